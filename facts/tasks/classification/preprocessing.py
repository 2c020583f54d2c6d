"""Image preprocessing and class labels of timm's and transformers' image classifiers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import timm.data
from PIL import Image
from torch import Tensor, nn

from facts.modules.networks import is_encoder, is_transformers

if TYPE_CHECKING:
    from transformers import BaseImageProcessor


@dataclass(frozen=True)
class Processed:
    """Transform of a PIL image into the tensor that a transformers model expects, by its image processor."""

    processor: "BaseImageProcessor"

    def __call__(self, image: Image.Image) -> Tensor:
        return self.processor(image, return_tensors="pt")["pixel_values"][0]


def processed_for(model: nn.Module) -> Processed | None:
    """Transform of a transformers model; None for other networks. Raises `ValueError` if it has no image processor."""
    if not is_transformers(model):
        return None
    if not hasattr(model, "image_processor"):
        message = f"{type(model).__name__} has no image processor: set model.image_processor"
        raise ValueError(f"{message}, or keep preprocessor_config.json next to its weights")
    return Processed(model.image_processor)


def data_config(model: nn.Module) -> dict[str, Any]:
    """The `input_size`, `mean` and `std` of a network's images; for timm's, also the rest of its data configuration."""
    processed = processed_for(model)
    if processed is None:
        return timm.data.resolve_model_data_config(model)
    processor: Any = processed.processor
    mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else ([0.0] * 3, [1.0] * 3)
    shape = processed(Image.new("RGB", (64, 64))).shape
    return {"input_size": tuple(shape), "mean": tuple(mean), "std": tuple(std)}


def preprocessing_key(model: nn.Module) -> Any:
    """Everything that determines the tensors of a network's evaluation images."""
    processed = processed_for(model)
    return data_config(model) if processed is None else repr(processed)


def num_classes(model: nn.Module) -> int:
    """Number of classes, 0 for an encoder."""
    if is_encoder(model):
        return 0
    return model.config.num_labels if is_transformers(model) else model.num_classes


def labels_by_name(model: nn.Module) -> dict[str, int]:
    """Labels of a network's classes by class name; empty if the classes have no names."""
    return dict(model.config.label2id or {}) if is_transformers(model) else {}
