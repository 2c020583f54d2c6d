"""Transfer of a classification network into the backbone of a detector or segmenter."""

import copy
import re
from collections.abc import Callable

from timm.layers import resample_abs_pos_embed
from timm.models import SwinTransformer, VisionTransformer
from torch import Tensor, nn

from facts.models.feature_network import FeatureNetwork
from facts.models.openmmlab import OpenMMLabModel
from facts.modules.lowrank import LowRankLayer, LowRankLinear
from facts.modules.pivoted import PivotedLinear
from facts.modules.pivots import pivoted_layer
from facts.utils.random import seeded

# Patterns of timm's module names, and OpenMMLab's names.
Names = dict[str, str | Callable[[re.Match[str]], str]]
SHARED: Names = {
    r"patch_embed\.proj\b": "patch_embed.projection",
    r"mlp\.fc1": "ffn.layers.0.0",
    r"mlp\.fc2": "ffn.layers.1",
}
SWIN: Names = {
    **SHARED,
    r"layers\.(\d)\.downsample": lambda match: f"stages.{int(match[1]) - 1}.downsample",  # timm starts a stage with it
    r"layers\.(\d+)\.blocks": r"stages.\1.blocks",
    r"\.attn\.": ".attn.w_msa.",
    r"^norm\.": "norm3.",
}
VIT: Names = {**SHARED, r"blocks\.(\d+)\.": r"layers.\1.", r"norm([12])": r"ln\1"}


def transplant(classifier: nn.Module, network: FeatureNetwork) -> None:
    """Copy the weights of a timm network with the same shapes, low-rank layers included, into the backbone.

    Parts that only one of them has are left alone: the classifier's head, and norms of the backbone's extra maps.
    Position embeddings are resampled. Raises `ValueError` for another family or other shapes.
    """
    if not isinstance(classifier, SwinTransformer | VisionTransformer):
        raise ValueError(f"a {type(classifier).__name__} cannot be the backbone: give timm's Swin or a plain ViT")
    names, own = (SWIN, ("head.",)) if isinstance(classifier, SwinTransformer) else (VIT, ("head.", "norm."))
    backbone = network.backbone
    try:
        low_rank = {name: module for name, module in classifier.named_modules() if isinstance(module, LowRankLayer)}
        for name, module in low_rank.items():
            backbone.set_submodule(_renamed(name, names), _with_own_inputs(name, module))
        tensors = {
            _renamed(name, names): _rearranged(name, tensor)
            for name, tensor in classifier.state_dict().items()
            if not name.startswith((*own, *(f"{name}." for name in low_rank)))
        }
        if names is VIT:
            _fit_embedding(tensors, backbone)
        unexpected = backbone.load_state_dict(tensors, strict=False).unexpected_keys
    except (AttributeError, RuntimeError) as error:
        message = f"the backbone {type(backbone).__name__} does not have its classifier's shapes: {error}"
        raise ValueError(message) from error
    if unexpected:
        raise ValueError(f"the backbone {type(backbone).__name__} has no place for {', '.join(unexpected)}")


def _renamed(name: str, names: Names) -> str:
    for pattern, replacement in names.items():
        name = re.sub(pattern, replacement, name)
    return name


def _rearranged(name: str, tensor: Tensor) -> Tensor:
    """Reorder the inputs of a downsampling layer."""
    if "downsample" not in name:
        return tensor
    # timm orders the four pixels by column, row, channel; mmdet by channel, row, column.
    return tensor.unflatten(-1, (2, 2, -1)).transpose(-3, -1).flatten(-3)


def _with_own_inputs(name: str, layer: LowRankLayer) -> LowRankLayer:
    """Copy a layer, with its inputs in the backbone's order."""
    if "downsample" not in name:
        return copy.deepcopy(layer)
    left, right = layer.factors()
    make = pivoted_layer if isinstance(layer, PivotedLinear) else LowRankLinear
    return make(left, _rearranged(name, right), layer.bias)


def _fit_embedding(tensors: dict[str, Tensor], backbone: nn.Module) -> None:
    """Resample the positions, and add the patches' bias to them, since mmsegmentation's projection has none."""
    side = int((backbone.pos_embed.shape[1] - 1) ** 0.5)
    positions = resample_abs_pos_embed(tensors["pos_embed"], [side, side], num_prefix_tokens=1).clone()
    positions[:, 1:] += tensors.pop("patch_embed.projection.bias")
    tensors["pos_embed"] = positions


def untrained(recipe: OpenMMLabModel, classifier: nn.Module, seed: int = 0) -> FeatureNetwork:
    """Build the recipe's network with the classifier's backbone, and heads with random weights."""
    with seeded(seed):
        network = recipe.architecture()
    transplant(classifier, network)
    network.recipe = recipe
    return network.eval()
