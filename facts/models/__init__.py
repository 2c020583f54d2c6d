"""Networks: timm's and torchvision's by name, OpenMMLab's and transformers' by configuration, and MambaVision."""

from facts.models.builders import MambaVisionModel, Recipe, TimmModel, TorchvisionModel
from facts.models.from_transformers import CausalLM, ImageClassifier, ImageEncoder, ImageTextModel
from facts.models.mambavision import MambaVision
from facts.models.openmmlab import OpenMMLabModel

OF_TRANSFORMERS = (CausalLM, ImageClassifier, ImageEncoder, ImageTextModel)
CLASSES = (TimmModel, TorchvisionModel, MambaVisionModel, OpenMMLabModel, *OF_TRANSFORMERS)
RECIPES = {recipe.kind: recipe for recipe in CLASSES}

__all__ = [
    "OF_TRANSFORMERS",
    "RECIPES",
    "CausalLM",
    "ImageClassifier",
    "ImageEncoder",
    "ImageTextModel",
    "MambaVision",
    "MambaVisionModel",
    "OpenMMLabModel",
    "Recipe",
    "TimmModel",
    "TorchvisionModel",
]
