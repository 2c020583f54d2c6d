"""Attention whose scores are no products of its inputs: only what it mixes, and its output products, are linear layers.

Rotations, norms of queries or keys, and groups of heads that share keys and values may stand before the scores.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facts.modules.heads import Heads, OutputCalls, Roles, repeated


class Chunk(nn.Module):
    """In place of the projection of values: some of the inputs' features, from `start`, as the values of all heads."""

    def __init__(self, num_heads: int, width: int):
        super().__init__()
        self.num_heads, self.width, self.start = num_heads, width, 0

    def forward(self, x: Tensor) -> Tensor:
        chunk = x[..., self.start : self.start + self.width]
        return repeated(F.pad(chunk, (0, self.width - chunk.shape[-1])), self.num_heads)


class CollectedCalls(OutputCalls):
    """In place of the output projection: the products with all features once their last chunk has been mixed."""

    def __init__(self, heads: Heads):
        super().__init__(heads)
        self.num_features = heads.values.shape[-1]
        self.mixed: list[Tensor] = []

    def forward(self, mixed: Tensor) -> Tensor:
        self.mixed.append(mixed.unflatten(-1, (self.num_heads, -1)))
        if sum(chunk.shape[-1] for chunk in self.mixed) < self.num_features:
            return mixed
        whole = torch.cat(self.mixed, dim=-1)[..., : self.num_features]
        self.mixed.clear()
        return super().forward(whole.flatten(-2))


class Mixing:
    """The code of an attention, run once for each chunk of its inputs: attention is linear in the values."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (chunk,) = (module for module in self.children() if isinstance(module, Chunk))  # type: ignore[attr-defined]
        (calls,) = (module for module in self.children() if isinstance(module, CollectedCalls))  # type: ignore[attr-defined]
        calls.mixed.clear()
        for start in range(0, calls.num_features, chunk.width):
            chunk.start = start
            outputs = super().forward(*args, **kwargs)  # type: ignore[misc]
        return outputs


def call_outputs(attention: nn.Module, roles: Roles) -> None:
    """Make an attention's own code mix its inputs, and compute its outputs by calls of linear layers."""
    heads = Heads.of(attention, roles)
    attention.set_submodule(roles.inputs[-1], Chunk(roles.num_groups, heads.width))
    attention.set_submodule(roles.output, CollectedCalls(heads))
    attention.__class__ = type(f"Mixing{type(attention).__name__}", (Mixing, type(attention)), {})
