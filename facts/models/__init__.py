"""Networks: timm's by tag, OpenMMLab's and transformers' by configuration, MambaVision, and small checkpoints."""

from facts.models.builders import MambaVisionModel, Recipe, TimmModel
from facts.models.from_transformers import CausalLM, ImageClassifier
from facts.models.mambavision import MambaVision
from facts.models.openmmlab import OpenMMLabModel

RECIPES = {recipe.kind: recipe for recipe in (TimmModel, MambaVisionModel, OpenMMLabModel, CausalLM, ImageClassifier)}

__all__ = [
    "RECIPES",
    "CausalLM",
    "ImageClassifier",
    "MambaVision",
    "MambaVisionModel",
    "OpenMMLabModel",
    "Recipe",
    "TimmModel",
]
