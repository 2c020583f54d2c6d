"""Parts of a network to which a plan assigns ranks: linear layers, and units, which are what a block computes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Literal, Self

import torch
from torch import Tensor, nn

from facts.cost.latency import TimedPart, measured_ranks
from facts.decomposition.elimination import eliminate
from facts.decomposition.truncation import Decomposition, decompose, decompose_product
from facts.estimators.base import KroneckerFactors
from facts.modules.forms import Form
from facts.modules.heads import Heads, Roles, output_cores, put_heads, score_cores
from facts.modules.hidden import HiddenRoles, empty_hidden, keep_hidden
from facts.modules.linear_calls import replace_submodule
from facts.modules.lowrank import LowRankLayer

PartsName = Literal["layers", "units"]
"""What is truncated: each linear layer, or attention's products and hidden units."""


@dataclass(frozen=True)
class Part(ABC):
    """A part of a network to which a plan assigns a rank, or None to leave it unchanged.

    `calls` names the linear layers of the calibrated network whose decompositions it uses, all at the same rank; each
    multiplies `rows` vectors per sample. `dense` is its number of weights without a rank.
    """

    calls: tuple[str, ...]
    rows: int
    dense: int

    @abstractmethod
    def largest(self) -> int:
        """The largest possible rank."""

    @abstractmethod
    def layers(self, network: nn.Module) -> list[str]:
        """Names of its linear layers in a network that does not call units as layers."""

    @abstractmethod
    def num_weights(self, form: Form, rank: int) -> int:
        """Number of weights at a rank, which is also that of multiply-accumulates per vector."""

    @abstractmethod
    def full_rank(self, form: Form) -> int:
        """The largest rank at which it costs no more than dense."""

    @abstractmethod
    def rank_of_ratio(self, form: Form, ratio: float) -> int:
        """The largest rank that costs at most `ratio` of the dense part, but at least 1."""

    @abstractmethod
    def decompose(self, layer: nn.Module, factors: KroneckerFactors, row: float, col: float) -> Decomposition:
        """Decompose one of its calls, with the shrinkage `row` of B and `col` of A."""

    @abstractmethod
    def timed(self, form: Form, precision: torch.dtype) -> TimedPart:
        """Describe it for a measurement of latency."""


@dataclass(frozen=True)
class LayerPart(Part):
    """A linear layer `[d_out, d_in]`."""

    d_out: int
    d_in: int
    bias: bool

    @classmethod
    def of(cls, name: str, layer: nn.Linear, rows: int) -> Self:
        d_out, d_in = layer.weight.shape
        return cls((name,), rows, d_out * d_in, d_out, d_in, layer.bias is not None)

    def timed(self, form: Form, precision: torch.dtype) -> TimedPart:
        (name,), shape = self.calls, (self.d_in, self.d_out, self.bias, self.rows)
        ranks = measured_ranks(self.full_rank(form))

        def put(network: nn.Module, rank: int) -> None:
            dense = network.get_submodule(name)
            assert isinstance(dense, nn.Linear)
            replace_submodule(network, name, form.stand_in(dense, rank, precision))

        return TimedPart(name, shape, ranks, partial(self.num_weights, form), put)

    def largest(self) -> int:
        return min(self.d_out, self.d_in)

    def layers(self, network: nn.Module) -> list[str]:
        return list(self.calls)

    def num_weights(self, form: Form, rank: int) -> int:
        return form.num_weights(self.d_out, self.d_in, rank)

    def full_rank(self, form: Form) -> int:
        return form.full_rank(self.d_out, self.d_in)

    def rank_of_ratio(self, form: Form, ratio: float) -> int:
        return form.rank_of_ratio(self.d_out, self.d_in, ratio)

    def decompose(self, layer: nn.Module, factors: KroneckerFactors, row: float, col: float) -> Decomposition:
        assert isinstance(layer, nn.Linear)
        return decompose(layer.weight.detach(), factors, shrinkage_row=row, shrinkage_col=col)


@dataclass(frozen=True)
class Unit(Part):
    """A unit of a block's module `owner`, `width` wide; cost is proportional to rank, whatever the form of layers.

    Ratios refer to `dense_width`, the width before any round.
    """

    owner: str
    width: int
    dense_width: int

    def largest(self) -> int:
        return self.width

    def layers(self, network: nn.Module) -> list[str]:
        module = network.get_submodule(self.owner)
        roles = Roles.of(module) or HiddenRoles.of(module)
        assert roles
        return [f"{self.owner}.{name}" for name in roles.layers(module)]

    def num_weights(self, form: Form, rank: int) -> int:
        return self.dense // self.width * rank

    def full_rank(self, form: Form) -> int:
        return self.width

    def rank_of_ratio(self, form: Form, ratio: float) -> int:
        return min(self.width, max(1, math.floor(Fraction(str(ratio)) * self.dense_width)))

    def timed(self, form: Form, precision: torch.dtype) -> TimedPart:
        ranks, shape = measured_ranks(self.width), (type(self), self.width, self.dense, self.rows)
        return TimedPart(self.owner, shape, ranks, partial(self.num_weights, form), self.put_empty, self.share_of_time)

    @property
    def share_of_time(self) -> float:
        """Its fraction of the module's time."""
        return 1.0

    @abstractmethod
    def put_empty(self, network: nn.Module, rank: int) -> None:
        """Narrow the unit in a fresh copy of the network, with meaningless weights, for timing."""


@dataclass(frozen=True)
class HeadsUnit(Unit):
    """Products of all heads of an attention; `alone` if the module has no other unit."""

    alone: bool = False

    @property
    def share_of_time(self) -> float:
        return 1.0 if self.alone else 0.5

    def put_empty(self, network: nn.Module, rank: int) -> None:
        attention = network.get_submodule(self.owner)
        if roles := Roles.of(attention):
            heads = Heads.of(attention, roles)
            if heads.output_width > rank:  # otherwise the other unit has narrowed both
                put_heads(attention, roles, heads.empty(None if self.alone else rank, rank))

    def decompose(self, layer: nn.Module, factors: KroneckerFactors, row: float, col: float) -> Decomposition:
        assert isinstance(layer, LowRankLayer)
        left, right = (factor.detach() for factor in layer.factors())
        return decompose_product(left, right, factors, shrinkage_row=row, shrinkage_col=col)

    @abstractmethod
    def narrowed(self, heads: Heads, calls: list[nn.Module], decompositions: list[Decomposition], rank: int) -> Heads:
        """Narrow the heads to a rank."""


@dataclass(frozen=True)
class ScoreUnit(HeadsUnit):
    """The products of queries and keys in all heads of an attention, whose output products are also a unit."""

    def narrowed(self, heads: Heads, calls: list[nn.Module], decompositions: list[Decomposition], rank: int) -> Heads:
        framed, _ = score_cores(heads)
        left, right = _stacked(decompositions, rank, heads.queries)
        bias = None if framed.query_bias is None else (right @ framed.query_bias[..., None]).squeeze(-1)
        return replace(framed, queries=right @ framed.queries, keys=left.mT @ framed.keys, query_bias=bias)


@dataclass(frozen=True)
class OutputUnit(HeadsUnit):
    """The products of values and outputs in all heads; the output bias absorbs the mean of what is lost."""

    def narrowed(self, heads: Heads, calls: list[nn.Module], decompositions: list[Decomposition], rank: int) -> Heads:
        framed, _ = output_cores(heads)
        left, right = _stacked(decompositions, rank, heads.values)
        bases = framed.outputs.unflatten(0, (len(right), -1)).transpose(1, 2).flatten(2)  # [G, D, h d]
        outputs = bases[:, None] @ left.unflatten(0, (len(right), -1))
        bias = framed.output_bias
        for basis, each, call in zip(bases, decompositions, calls, strict=True):
            added = each.bias(call, rank)  # type: ignore[arg-type]
            if bias is not None and added is not None:
                bias = bias + basis @ added.to(basis)
        return replace(framed, values=right @ framed.values, outputs=outputs.flatten(0, 1), output_bias=bias)


@dataclass(frozen=True)
class HiddenUnit(Unit):
    """The hidden units of an MLP; its only call is the layer that reads them."""

    def put_empty(self, network: nn.Module, rank: int) -> None:
        mlp = network.get_submodule(self.owner)
        if roles := HiddenRoles.of(mlp):
            empty_hidden(mlp, roles, rank)

    def decompose(self, layer: nn.Module, factors: KroneckerFactors, row: float, col: float) -> Decomposition:
        assert isinstance(layer, nn.Linear)
        return eliminate(layer.weight.detach(), factors, shrinkage_row=row, shrinkage_col=col)

    def narrow(self, mlp: nn.Module, decomposition: Decomposition, rank: int) -> None:
        """Keep the first `rank` hidden units of a module, in the order of the decomposition."""
        roles = HiddenRoles.of(mlp)
        assert roles and decomposition.order is not None
        down = mlp.get_submodule(roles.down)
        assert isinstance(down, nn.Linear)
        left, right = (factor.to(down.weight.device).double() for factor in decomposition.truncate(rank))
        kept = decomposition.order[:rank].to(down.weight.device).sort().values
        keep_hidden(mlp, roles, kept, left @ right[:, kept], decomposition.bias(down, rank))


def put_units(
    compressed: nn.Module,
    network: nn.Module,
    units: Mapping[str, Unit],
    decompositions: Mapping[str, Decomposition],
    plan: Mapping[str, int | None],
) -> None:
    """Narrow the units that have a rank in the plan, those of the same module together.

    `network` is the calibrated one, which calls the units as linear layers.
    """
    attention: dict[str, list[tuple[HeadsUnit, int]]] = {}
    for name, unit in units.items():
        rank = plan[name]
        if rank is None:
            continue
        if isinstance(unit, HiddenUnit):
            unit.narrow(compressed.get_submodule(unit.owner), decompositions[unit.calls[0]], rank)
        elif isinstance(unit, HeadsUnit):
            attention.setdefault(unit.owner, []).append((unit, rank))
    for owner, narrowed in attention.items():
        module = compressed.get_submodule(owner)
        roles = Roles.of(module)
        assert roles
        heads = Heads.of(module, roles)
        for unit, rank in narrowed:
            calls = [network.get_submodule(call) for call in unit.calls]
            heads = unit.narrowed(heads, calls, [decompositions[call] for call in unit.calls], rank)
        put_heads(module, roles, heads)


def _stacked(decompositions: list[Decomposition], rank: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Stack the leading factors of all heads, `[H, m, rank]`, and of all groups, `[G, rank, d]`."""
    lefts, rights = zip(*(each.truncate(rank) for each in decompositions), strict=True)
    return torch.stack(lefts).flatten(0, -3).to(like), torch.stack(rights).to(like)
