"""Recipes that build a network from a few plain values, so that a folder of JSON and safetensors can name one."""

from pathlib import Path
from typing import Any, ClassVar

import timm
import torch
from huggingface_hub import try_to_load_from_cache
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from facts.models.mambavision import MambaVision

CHECKPOINTS = Path(__file__).parent / "checkpoints"


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Recipe:
    """What is needed to build one network: an architecture and where its weights come from.

    `weights` is `pretrained` (the published ones), `random`, or a checkpoint file; a relative file is looked for in
    the package's own `models/checkpoints`, then in the working folder. `arguments` go to the architecture.
    """

    weights: str = "pretrained"
    arguments: dict[str, Any] = Field(default_factory=dict)

    def checkpoint(self) -> Path | None:
        """The file of the weights on this machine; None for random weights and for those yet to be fetched."""
        return None if self.weights in ("pretrained", "random") else find_checkpoint(self.weights)

    def build(self) -> nn.Module:
        """The network in evaluation mode. Raises `FileNotFoundError` or `ValueError` where its weights do not fit."""
        model = self.architecture(pretrained=self.weights == "pretrained")
        if self.weights not in ("pretrained", "random"):
            load_strictly(model, read_checkpoint(find_checkpoint(self.weights)))
        model.recipe = self
        return model.eval()


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class TimmModel(Recipe):
    """A model of timm by its tag, such as `swin_base_patch4_window7_224.ms_in22k_ft_in1k`."""

    kind: ClassVar[str] = "timm"
    tag: str

    def checkpoint(self) -> Path | None:
        if self.weights != "pretrained":
            return super().checkpoint()
        config = timm.get_pretrained_cfg(self.tag)
        for name in ("model.safetensors", "pytorch_model.bin"):
            if isinstance(path := try_to_load_from_cache(config.hf_hub_id, name), str):
                return Path(path)
        return None

    def architecture(self, pretrained: bool = False) -> nn.Module:
        try:
            return timm.create_model(self.tag, pretrained=pretrained, **self.arguments)
        except OSError as error:
            raise FileNotFoundError(
                f"the weights of {self.tag} could not be fetched ({error}). Connect this machine to their hub once, "
                "or set weights to a checkpoint file."
            ) from error


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class MambaVisionModel(Recipe):
    """A MambaVision of this package; NVIDIA publishes its weights as a file, so `pretrained` has no meaning here."""

    kind: ClassVar[str] = "mambavision"
    variant: str

    def architecture(self, pretrained: bool = False) -> nn.Module:
        if pretrained:
            raise ValueError(
                "MambaVision's weights come as a file: set weights to the path of the official checkpoint, "
                "for instance mambavision_base_1k.pth.tar"
            )
        return MambaVision.from_variant(self.variant, **self.arguments)


RECIPES = {recipe.kind: recipe for recipe in (TimmModel, MambaVisionModel)}


def find_checkpoint(weights: str) -> Path:
    candidates = [CHECKPOINTS / weights, Path(weights).expanduser()]
    for path in candidates:
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"no checkpoint {weights!r}: looked for {' and '.join(str(path) for path in candidates)}. "
        "Give a safetensors or PyTorch file, or `pretrained` or `random`."
    )


def read_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file or of a PyTorch file (its `state_dict` or `model` entry, where it has one)."""
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"the checkpoint {path} cannot be read ({error}); fetch it again") from error
    content = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model"):
        content = content.get(key, content)
    return content


def load_strictly(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Load every tensor by name; half-precision tensors become the model's own type."""
    try:
        model.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise ValueError(f"the checkpoint does not fit the architecture: {error}") from error
