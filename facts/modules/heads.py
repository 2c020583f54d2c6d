"""Modules of narrower attention heads, and those with which attention calls a linear layer within each product."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facts.modules.lowrank import LayersOfHeads, LowRankLayer, LowRankLinear


class PaddedHeads(nn.Module):
    """Projection to heads of several `widths`, each zero-padded to one width, for code that needs equal widths."""

    def __init__(self, linear: nn.Linear, widths: tuple[int, ...], num_heads: int, padded: int):
        super().__init__()
        self.linear, self.widths, self.num_heads, self.padded = linear, widths, num_heads, padded

    def forward(self, x: Tensor) -> Tensor:
        parts = self.linear(x).split([width * self.num_heads for width in self.widths], dim=-1)
        padded = []
        for number, width in enumerate(self.widths):  # torch.fx traces no loop over parts
            heads = parts[number]
            if width < self.padded:
                heads = F.pad(heads.unflatten(-1, (self.num_heads, -1)), (0, self.padded - width)).flatten(-2)
            padded.append(heads)
        return torch.cat(padded, dim=-1)

    def extra_repr(self) -> str:
        return f"widths={self.widths}, padded={self.padded}"


class LeadingOfHeads(nn.Module):
    """A linear layer on the first columns of each head; the others are zero padding."""

    def __init__(self, linear: nn.Linear, num_heads: int):
        super().__init__()
        self.linear, self.num_heads = linear, num_heads

    def forward(self, x: Tensor) -> Tensor:
        width = self.linear.in_features // self.num_heads
        return self.linear(x.unflatten(-1, (self.num_heads, -1))[..., :width].flatten(-2))


class GroupedProduct(LowRankLinear):
    """Products `left_h @ right` for heads that share values: `[..., h, n]` to `[..., h, m]`, with `left [h, m, r]`."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...hr,hmr->...hm", F.linear(x, self.right), self.left)


class ScoreCores(nn.Module):
    """A projection whose outputs begin with the queries, followed by each head's core."""

    def __init__(self, projection: nn.Module, cores: list[LowRankLayer]):
        super().__init__()
        self.projection, self.heads = projection, LayersOfHeads(cores, len(cores))
        self.padded = projection.padded if isinstance(projection, PaddedHeads) else self.heads.in_features

    def forward(self, x: Tensor) -> Tensor:
        projected = self.projection(x)
        size = self.padded * len(self.heads)
        queries = projected[..., :size].unflatten(-1, (len(self.heads), -1))
        scored = self.heads(queries[..., : self.heads.in_features])
        scored = F.pad(scored, (0, self.padded - scored.shape[-1])).flatten(-2)
        return torch.cat([scored, projected[..., size:]], dim=-1)


class OutputCores(nn.Module):
    """Each group's core, followed by the output projection."""

    def __init__(self, projection: nn.Linear, cores: list[LowRankLayer], num_heads: int):
        super().__init__()
        self.projection, self.heads = projection, LayersOfHeads(cores, num_heads)

    def forward(self, mixed: Tensor) -> Tensor:
        heads = mixed.unflatten(-1, (self.heads.num_heads, -1))
        outputs = self.heads(heads[..., : self.heads.in_features])
        return self.projection(outputs.unflatten(-2, (len(self.heads), -1)).sum(dim=-2).flatten(-2))


def linear_of(module: nn.Module) -> nn.Linear:
    """Get the linear layer of a projection, which may be padded."""
    linear = module if isinstance(module, nn.Linear) else module.linear
    assert isinstance(linear, nn.Linear)
    return linear
