"""Image classifiers of transformers, with their image processors."""

from contextlib import suppress
from typing import Any, ClassVar

from torch import nn

from facts.models.from_transformers import TransformersModel, read_image_processor
from facts.utils.hub import offline
from facts.utils.options import options

LABELS = ("id2label", "label2id")  # names of classes, in any words
FOREIGN = "timm_wrapper"  # would have timm build, and load, what its other settings say


@options
class ImageClassifier(TransformersModel):
    """Any `AutoModelForImageClassification`, by its `configuration` or by the one published under a `tag`.

    `arguments` change fields of the configuration. Weights are read as float32; the image processor beside them becomes
    the network's `.image_processor`. No code is fetched.
    """

    kind: ClassVar[str] = "transformers_images"
    auto_class: ClassVar[str] = "AutoModelForImageClassification"
    mapping: ClassVar[str] = "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"

    @classmethod
    def configuration_of(cls, model: nn.Module) -> dict[str, Any]:
        """The settings with the class that they build, since some have several."""
        return {**super().configuration_of(model), "architectures": [type(model).__name__]}

    def refuse_foreign(self) -> None:
        super().refuse_foreign()
        if self.configuration and self.configuration.get("model_type") == FOREIGN:
            raise ValueError(f"a network of timm within transformers ({FOREIGN}) cannot be saved: compress timm's own")

    def without_prose(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if name not in LABELS}

    def fetch_beside(self, model: nn.Module) -> None:
        if self.tag and not hasattr(model, "image_processor"):
            with suppress(OSError):
                model.image_processor = read_image_processor(self.tag, local_files_only=offline())  # type: ignore[assignment]
