"""Networks: timm's by their tags, MambaVision written here, and the small checkpoints that ship with the package."""

from facts.models.builders import MambaVisionModel, Recipe, TimmModel
from facts.models.mambavision import MambaVision

__all__ = ["MambaVision", "MambaVisionModel", "Recipe", "TimmModel"]
