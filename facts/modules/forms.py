"""Forms of a low-rank layer: two plain factors, or pivots and the other rows or columns as combinations of them."""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from facts.modules.lowrank import LowRankLayer, LowRankLinear
from facts.modules.pivoted import Layout, PivotedLinear
from facts.modules.pivots import LEADING_ERROR, arithmetic_of, pivoted_layer

FormName = Literal["plain", "pivoted"]


@dataclass(frozen=True)
class Form(ABC):
    """How a layer of rank k is stored, accurate enough to run in `precision`, and how many weights that takes."""

    name: ClassVar[FormName]
    precision: torch.dtype = torch.float32

    @abstractmethod
    def layer(self, dense: nn.Linear, left: Tensor, right: Tensor) -> LowRankLayer:
        """Make the layer `left [d_out, k] @ right [k, d_in]` to replace a dense one."""

    @abstractmethod
    def empty(self, dense: nn.Linear, rank: int) -> LowRankLayer:
        """Make a layer with the dense one's size, type and bias but meaningless weights."""

    @abstractmethod
    def num_weights(self, d_out: int, d_in: int, rank: int) -> int:
        """Count the weights of a layer, which are also its multiply-accumulates per vector."""

    def full_rank(self, d_out: int, d_in: int) -> int:
        """The largest rank at which the layer costs no more than the dense one."""
        return self._largest_rank(d_out, d_in, d_out * d_in)

    def rank_of_ratio(self, d_out: int, d_in: int, ratio: float) -> int:
        """The rank for a cost of at most `ratio` of the dense layer's, but at least rank 1 (paper, section 5.1)."""
        return max(1, self._largest_rank(d_out, d_in, math.floor(Fraction(str(ratio)) * d_out * d_in)))

    def _largest_rank(self, d_out: int, d_in: int, allowed: int) -> int:
        ranks = range(1, min(d_out, d_in) + 1)
        return bisect_right(ranks, allowed, key=lambda rank: self.num_weights(d_out, d_in, rank))


class Plain(Form):
    """Two factors, `[d_out, k]` and `[k, d_in]`."""

    name = "plain"

    def layer(self, dense: nn.Linear, left: Tensor, right: Tensor) -> LowRankLayer:
        return LowRankLinear(left.to(dense.weight), right.to(dense.weight), dense.bias)

    def empty(self, dense: nn.Linear, rank: int) -> LowRankLayer:
        return _filled(LowRankLinear.empty(dense, rank))

    def num_weights(self, d_out: int, d_in: int, rank: int) -> int:
        return rank * (d_out + d_in)

    def rank_of_ratio(self, d_out: int, d_in: int, ratio: float) -> int:
        return max(1, int(self.full_rank(d_out, d_in) * ratio))


@dataclass(frozen=True)
class Pivoted(Form):
    """k pivots among the rows or columns, and the coefficients of the others: never more expensive than dense.

    An empty layer has the `layout`, by default the one that takes longest in this precision.
    """

    name = "pivoted"
    layout: Layout | None = None

    def layer(self, dense: nn.Linear, left: Tensor, right: Tensor) -> LowRankLayer:
        left, right = left.to(dense.weight.device), right.to(dense.weight.device)
        return pivoted_layer(left, right, dense.bias, dense.weight.dtype, arithmetic_of(dense.weight, self.precision))

    def empty(self, dense: nn.Linear, rank: int) -> LowRankLayer:
        leads = torch.finfo(arithmetic_of(dense.weight, self.precision)).eps < LEADING_ERROR
        layer = PivotedLinear.empty(dense, rank, self.layout or ("columns" if leads else "scattered columns"))
        if layer.order is not None:
            layer.order = layer.order.flip(0)
        return _filled(layer)

    def num_weights(self, d_out: int, d_in: int, rank: int) -> int:
        return rank * (d_out + d_in - rank)


PLAIN = Plain()
FORMS: dict[FormName, type[Form]] = {"plain": Plain, "pivoted": Pivoted}


def refuse_unknown_form(name: str) -> None:
    """Raises `ValueError`, which lists the choices, for an unknown form."""
    if name not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {name!r}")


def _filled(layer: LowRankLayer) -> LowRankLayer:
    """Fill the weights with equal entries that preserve the magnitude of their inputs."""
    for parameter in layer.parameters():
        if parameter is not layer.bias:
            nn.init.constant_(parameter, 1 / max(1, parameter.shape[1]))
    return layer
