"""Networks: timm's by their tags, OpenMMLab's by their configurations, MambaVision written here, small checkpoints."""

from facts.models.builders import MambaVisionModel, Recipe, TimmModel
from facts.models.mambavision import MambaVision
from facts.models.openmmlab import OpenMMLabModel

RECIPES = {recipe.kind: recipe for recipe in (TimmModel, MambaVisionModel, OpenMMLabModel)}

__all__ = ["RECIPES", "MambaVision", "MambaVisionModel", "OpenMMLabModel", "Recipe", "TimmModel"]
