"""Image classifiers of torchvision."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torchvision import models

from facts.models.builders import Recipe
from facts.utils.options import options

NUM_CLASSES = 1000  # of all published weights
OTHERS = ("googlenet", "inception_v3", "mnasnet*", "regnet*", "vit_h_14")  # a name and tensors cannot rebuild these


@options
class TorchvisionModel(Recipe):
    """A torchvision image classifier, given by its name, such as `resnet50`; `pretrained` loads its default weights.

    Images are prepared as for the default weights, through a `pretrained_cfg` like timm's.
    """

    kind: ClassVar[str] = "torchvision"
    tag: str

    @property
    def name(self) -> str:
        return self.tag

    @property
    def repository(self) -> str:
        return ""

    @property
    def published(self) -> Any:
        return models.get_model_weights(self.tag).DEFAULT

    def checkpoint(self) -> Path | None:
        if self.weights != "pretrained":
            return super().checkpoint()
        path = Path(torch.hub.get_dir(), "checkpoints", Path(self.published.url).name)
        return path if path.is_file() else None

    def architecture(self) -> nn.Module:
        return self._described(models.get_model(self.tag, weights=None, **self.arguments))

    def build(self) -> nn.Module:
        """Build the network; torchvision loads its own weights, since older files name tensors differently."""
        if self.weights != "pretrained":
            return super().build()
        if self.arguments.get("num_classes", NUM_CLASSES) != NUM_CLASSES:
            raise ValueError(f"the published weights of {self.tag} are for 1,000 classes: set weights to your own file")
        try:
            model = self._described(models.get_model(self.tag, weights=self.published, **self.arguments))
        except (OSError, RuntimeError) as error:  # the latter if the file is damaged
            message = f"the weights of {self.tag} could not be fetched from {self.published.url} ({error})"
            raise FileNotFoundError(f"{message}: connect once, or set weights to a checkpoint file") from error
        model.recipe = self  # type: ignore[assignment]
        return model.eval()

    def _described(self, model: nn.Module) -> nn.Module:
        """Add the attributes by which timm's networks describe their images and classes."""
        images = self.published.transforms()
        (size,), (resized,) = images.crop_size, images.resize_size
        how = {"crop_pct": size / resized, "interpolation": images.interpolation.value}
        cfg = {"input_size": (3, size, size), **how, "mean": tuple(images.mean), "std": tuple(images.std)}
        vars(model).update(pretrained_cfg=cfg, num_classes=self.arguments.get("num_classes", NUM_CLASSES))
        return model

    def refuse_foreign(self) -> None:
        super().refuse_foreign()
        loading = any(name.startswith(("weights", "pretrained")) for name in self.arguments)
        if loading or self.tag not in classifiers():
            raise ValueError(f"torchvision's {self.tag} is not a known classifier, or would load something")


def classifiers() -> list[str]:
    return models.list_models(module=models, exclude=OTHERS)
