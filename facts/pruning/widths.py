"""The widths of a vision transformer that can be narrowed, and the parameter entries of each of their units."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from facts.pruning.slicing import slice_parameter
from facts.pruning.vit import TOKENS, note_embedding

EMBEDDING = "embedding"
BLOCK_WIDTHS = ("heads", "key_dims", "value_dims", "hidden")


@dataclass(frozen=True)
class Place:
    """An axis of a parameter, and the unit of a width that each of its entries belongs to; -1 for none."""

    module: str
    name: str
    axis: int
    units: Tensor


@dataclass(frozen=True)
class Width:
    size: int
    places: list[Place]


def widths_of(model: VisionTransformer) -> dict[str, Width]:
    """Every width of a network whose attention is `NarrowAttention`: the embedding, and four in each block.

    A dimension of queries and keys, or of values, spans all heads of a block, so the heads stay alike.
    """
    widths = {EMBEDDING: Width(model.embed_dim, list(_embedding_places(model)))}
    for number, block in enumerate(model.blocks):
        prefix = f"blocks.{number}"
        attn, hidden = block.attn, torch.arange(block.mlp.fc1.out_features)
        heads, keys, values = (torch.arange(size) for size in (attn.num_heads, attn.key_dim, attn.value_dim))
        of_keys, of_values = (heads.repeat_interleave(len(dims)) for dims in (keys, values))
        no_keys, no_values = -torch.ones_like(of_keys.repeat(2)), -torch.ones_like(of_values)
        of_block = {
            "heads": [
                *_outputs(f"{prefix}.attn.qkv", attn.qkv, torch.cat([of_keys, of_keys, of_values])),
                Place(f"{prefix}.attn.proj", "weight", 1, of_values),
            ],
            "key_dims": _outputs(f"{prefix}.attn.qkv", attn.qkv, torch.cat([keys.repeat(2 * len(heads)), no_values])),
            "value_dims": [
                *_outputs(f"{prefix}.attn.qkv", attn.qkv, torch.cat([no_keys, values.repeat(len(heads))])),
                Place(f"{prefix}.attn.proj", "weight", 1, values.repeat(len(heads))),
            ],
            "hidden": [
                *_outputs(f"{prefix}.mlp.fc1", block.mlp.fc1, hidden),
                Place(f"{prefix}.mlp.fc2", "weight", 1, hidden),
            ],
        }
        for name, places in of_block.items():
            widths[f"{prefix}.{name}"] = Width(int(places[0].units.max()) + 1, places)
    return widths


def _outputs(name: str, layer: nn.Module, units: Tensor) -> list[Place]:
    return [Place(name, parameter, 0, units) for parameter, _ in layer.named_parameters()]


def _embedding_places(model: VisionTransformer) -> Iterator[Place]:
    units = torch.arange(model.embed_dim)
    for token in TOKENS:
        if getattr(model, token, None) is not None:
            yield Place("", token, 2, units)
    for name, module in model.named_modules():
        if name.endswith(("qkv", "fc1", "head", "head_dist")):
            yield Place(name, "weight", 1, units)
        elif name.endswith(("patch_embed.proj", "attn.proj", "fc2")) or isinstance(module, nn.LayerNorm):
            yield from _outputs(name, module, units)


def importance(model: VisionTransformer, widths: Mapping[str, Width]) -> dict[str, Tensor]:
    """(Σ gradient · weight)² over the entries of each unit, for the current gradients: NViT's saliency."""
    scores = {}
    device = next(model.parameters()).device
    for name, width in widths.items():
        total = torch.zeros(width.size + 1, device=device)  # the last entry is for units -1
        for place in width.places:
            parameter = getattr(model.get_submodule(place.module), place.name)
            products = (parameter.detach() * parameter.grad).movedim(place.axis, 0).reshape(len(place.units), -1)
            total.index_add_(0, place.units.to(device) % len(total), products.sum(dim=1))
        scores[name] = total[:-1].square()
    return scores


def without(model: VisionTransformer, widths: Mapping[str, Width], kept: Mapping[str, Tensor]) -> VisionTransformer:
    """Copy the model; each width keeps the units in its mask in `kept`."""
    model = copy.deepcopy(model)
    masks: dict[tuple[str, str, int], Tensor] = {}
    for name, width in widths.items():
        keeps = torch.cat([kept[name], torch.ones(1, dtype=torch.bool)])  # units -1 stay
        for place in width.places:
            key = (place.module, place.name, place.axis)
            masks[key] = keeps[place.units] & masks.get(key, True)
    for (module, name, axis), mask in masks.items():
        slice_parameter(model.get_submodule(module), name, axis, mask.nonzero().squeeze(1))
    for number, block in enumerate(model.blocks):
        heads, key_dims, value_dims, _ = (int(kept[f"blocks.{number}.{name}"].sum()) for name in BLOCK_WIDTHS)
        block.attn.num_heads, block.attn.key_dim, block.attn.value_dim = heads, key_dims, value_dims
    note_sizes(model)
    return model


def note_sizes(model: VisionTransformer) -> None:
    """Update the attributes that hold the widths of the layers."""
    note_embedding(model)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.Conv2d):
            module.out_channels = len(module.weight)
        elif isinstance(module, nn.LayerNorm):
            module.normalized_shape = tuple(module.weight.shape)
