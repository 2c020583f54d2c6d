"""Networks: timm's and torchvision's by name, OpenMMLab's and transformers' by configuration, and MambaVision."""

from facts.models.builders import MambaVisionModel, Recipe, TimmModel
from facts.models.from_torchvision import TorchvisionModel
from facts.models.from_transformers import CausalLM, ImageClassifier, ImageEncoder
from facts.models.mambavision import MambaVision
from facts.models.openmmlab import OpenMMLabModel

KINDS = (TimmModel, TorchvisionModel, MambaVisionModel, OpenMMLabModel, CausalLM, ImageClassifier, ImageEncoder)
RECIPES = {recipe.kind: recipe for recipe in KINDS}

__all__ = [
    "RECIPES",
    "CausalLM",
    "ImageClassifier",
    "ImageEncoder",
    "MambaVision",
    "MambaVisionModel",
    "OpenMMLabModel",
    "Recipe",
    "TimmModel",
    "TorchvisionModel",
]
