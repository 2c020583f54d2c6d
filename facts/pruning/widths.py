"""Widths of a vision transformer that can be narrowed, and the parameter entries of each of their units."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from facts.pruning.vit import TOKENS, slice_parameter, update_sizes

EMBEDDING = "embedding"
BLOCK_WIDTHS = ("heads", "key_dims", "value_dims", "hidden")


class NarrowAttention(nn.Module):
    """timm's attention with the same weights and scale; queries and keys may differ in width from values."""

    def __init__(self, attention: Attention):
        super().__init__()
        self.num_heads, self.scale = attention.num_heads, attention.scale
        self.qkv, self.attn_drop = attention.qkv, attention.attn_drop
        self.proj, self.proj_drop = attention.proj, attention.proj_drop
        self.key_dim = self.value_dim = attention.head_dim

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        keys, values = self.num_heads * self.key_dim, self.num_heads * self.value_dim
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).split([keys, keys, values], dim=-1)
        )
        drop = self.attn_drop.p if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, attn_mask, drop, is_causal, scale=self.scale)
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))


@dataclass(frozen=True)
class Place:
    """An axis of a parameter, and the unit of a width that each of its entries belongs to; -1 for none."""

    module: str
    name: str
    axis: int
    units: Tensor


@dataclass(frozen=True)
class Width:
    """Number of units, and the places of their parameter entries."""

    size: int
    places: list[Place]


def widths_of(model: VisionTransformer) -> dict[str, Width]:
    """Find the embedding and four widths per block of a network with `NarrowAttention`; heads stay equally wide."""
    widths = {EMBEDDING: Width(model.embed_dim, list(_embedding_places(model)))}
    for number, block in enumerate(model.blocks):
        prefix, attn = f"blocks.{number}", block.attn
        sizes = (attn.num_heads, attn.key_dim, attn.value_dim, block.mlp.fc1.out_features)
        heads, keys, values, hidden = (torch.arange(size) for size in sizes)
        head_of_key, head_of_value = (heads.repeat_interleave(len(dims)) for dims in (keys, values))
        no_key, no_value = -torch.ones_like(head_of_key.repeat(2)), -torch.ones_like(head_of_value)
        value_of_head = values.repeat(len(heads))
        units = (  # one for each output of the first layer, and for each input of the second
            (torch.cat([head_of_key, head_of_key, head_of_value]), head_of_value),
            (torch.cat([keys.repeat(2 * len(heads)), no_value]), None),
            (torch.cat([no_key, value_of_head]), value_of_head),
            (hidden, hidden),
        )
        layers = [("attn.qkv", "attn.proj")] * 3 + [("mlp.fc1", "mlp.fc2")]
        for name, size, (first, second), (outputs, inputs) in zip(BLOCK_WIDTHS, sizes, layers, units, strict=True):
            places = _outputs(f"{prefix}.{first}", block.get_submodule(first), outputs)
            if inputs is not None:
                places.append(Place(f"{prefix}.{second}", "weight", 1, inputs))
            widths[f"{prefix}.{name}"] = Width(size, places)
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
        total = torch.zeros(width.size + 1, device=device)  # the last entry is for unit -1
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
        keeps = torch.cat([kept[name], torch.ones(1, dtype=torch.bool)])  # unit -1 stays
        for place in width.places:
            key = (place.module, place.name, place.axis)
            masks[key] = keeps[place.units] & masks.get(key, True)
    for (module, name, axis), mask in masks.items():
        slice_parameter(model.get_submodule(module), name, axis, mask.nonzero().squeeze(1))
    for number, block in enumerate(model.blocks):
        heads, key_dims, value_dims, _ = (int(kept[f"blocks.{number}.{name}"].sum()) for name in BLOCK_WIDTHS)
        block.attn.num_heads, block.attn.key_dim, block.attn.value_dim = heads, key_dims, value_dims
    update_sizes(model)
    return model
