"""The questions that a kind of part answers, all in its own file.

Elsewhere in `facts`, nothing asks what kind a part is, only whether it `is_unit` and whether it `shortens` inputs.

Finding, linear layers, decomposition, errors, cost, and `put`, the only way to change a network.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from facts.cost.probe import Call
from facts.cost.timing import measured_ranks
from facts.decomposition.truncation import Decomposition
from facts.estimators.base import Estimator, KroneckerFactors
from facts.modules.forms import Form
from facts.modules.linear_calls import copy_with
from facts.modules.lowrank import LinearLayer, LowRankLayer, LowRankLinear
from facts.moments.batch import LayerBatch

Plan = dict[str, int | None]
"""Rank of each part by name; None leaves it dense."""

Problem = tuple[Any, KroneckerFactors, float, float]
"""A linear layer to decompose, its factors, and the shrinkage of B and of A."""


Size = Annotated[int, Field(ge=0, le=2**31)]  # in folders from elsewhere


@dataclass(frozen=True)
class Description:
    """Fields of a part that cannot be read off the original network's modules; `behind` for costs only."""

    tokens: Size
    protected: Size
    size: Size
    entry: str
    num_directions: Size
    behind: tuple[str, ...] = ()
    fixed: tuple[Annotated[int, Field(ge=-(2**31), le=2**31)], ...] = ()

    @classmethod
    def of(cls, part: Any) -> Self:
        """The description of a part that has such fields."""
        return cls(*(getattr(part, each.name) for each in fields(cls)))


INTEGERS = ("order", "num_repaired")  # fields of a decomposition


@dataclass(frozen=True)
class Part(ABC):
    """A part of a network to which a plan assigns a rank, or None to leave it dense.

    It is in the module `owner`, which holds the linear `layers`; each of its `linears`, layers that the rewritten
    network calls, multiplies `rows` vectors per sample. All are decomposed and truncated at the same rank. `dense`
    counts its weights without a rank. `stages` are the parts before it, the nearest last, that leave it fewer of the
    `tokens`.
    """

    name: str
    owner: str
    layers: tuple[str, ...]
    linears: tuple[str, ...]
    dense: int
    rows: int = 1
    stages: tuple[str, ...] = ()
    tokens: int = 0

    is_unit: ClassVar[bool] = False
    """Whether a rank is the width of a unit of a block: `put` leaves plain layers, and biases absorb the mean."""
    shortens: ClassVar[bool] = False
    """Whether a rank is the number of tokens that the parts after it compute with."""

    @property
    @abstractmethod
    def largest(self) -> int:
        """The largest possible rank."""

    @property
    def least(self) -> int:
        """The smallest possible rank."""
        return 1

    @property
    def full_rank(self) -> int:
        """The largest rank at which it costs no more than dense."""
        return self.largest

    @abstractmethod
    def rank_of_ratio(self, ratio: float) -> int:
        """The largest rank that costs at most `ratio` of the dense part, but at least 1."""

    def candidates(self, multiple: int, at_least: int, between: tuple[float, float]) -> list[int]:
        """The ranks to choose from: multiples of `multiple` with ratios `between` two values."""
        lowest, highest = map(self.rank_of_ratio, between)
        return candidate_ranks(lowest, highest, multiple, at_least)

    @abstractmethod
    def num_weights(self, rank: int | None) -> int:
        """Number of weights at a rank, which is also that of multiply-accumulates per vector."""

    def flops(self, rank: int | None, plan: Mapping[str, int | None]) -> int:
        """FLOPs per sample at a rank, given the plan of the parts before it."""
        rows = self.rows * self.remaining(plan) // self.tokens if self.stages else self.rows
        return 2 * rows * self.num_weights(rank)

    def remaining(self, plan: Mapping[str, int | None]) -> int:
        """The number of tokens that the parts before it leave."""
        return next((left for stage in reversed(self.stages) if (left := plan.get(stage))), self.tokens)

    def weighed_by(self, estimator: Estimator) -> Self:
        """The same part, without what it would compute by factors that the estimator lacks."""
        return self

    @property
    def alike(self) -> Any:
        """Parts with the same value take equally long, dense and at each of `timed_ranks`."""
        return type(self), self.dense, self.rows, self.largest

    @property
    def timed_ranks(self) -> tuple[int, ...]:
        return measured_ranks(self.full_rank)

    @abstractmethod
    def decompose(self, linear: nn.Module, factors: KroneckerFactors, row: float, col: float) -> Decomposition:
        """Decompose one of its linears, with the shrinkage `row` of B and `col` of A."""

    def num_together(self, linear: nn.Module) -> int:
        """How many layers of the size of one of its linears are best decomposed together on its device."""
        return len(self.linears)

    def decompose_together(self, problems: Sequence[Problem]) -> list[Decomposition]:
        """Decompose linears of parts of this kind, all of one size."""
        return [self.decompose(*problem) for problem in problems]

    def truncated(self, linear: LinearLayer, decomposition: Decomposition, rank: int) -> LowRankLayer:
        """Make one of its linears at a rank, to measure errors."""
        left, right = (factor.to(next(linear.parameters())) for factor in decomposition.truncate(rank))
        return LowRankLinear(left, right, decomposition.bias(linear, rank))

    def slopes(self, batch: LayerBatch, decomposition: Decomposition) -> Tensor:
        """Slopes c_j = Σ_t (g_t · u_j)(v_j · x_t) of each sample's loss along the components of a linear, `[N, k]`.

        The error at rank r is ½ mean (Σ_{j >= r} c_j)², with the c_j of all linears added. If the bias absorbs the mean
        of the inputs, x_t is relative to it.
        """
        x, left, right = centred_inputs(batch, decomposition)
        return ((batch.g @ left) * (x @ right.T)).sum(dim=1)

    @abstractmethod
    def put(self, model: nn.Module, rank: int, weights: Mapping[str, Decomposition] | None = None) -> None:
        """Change a network to this rank, with the decompositions of `linears` or, if None, with empty weights."""

    def loads_without_facts(self) -> bool:
        """Whether the code in `facts/saving/standalone.py` can put it."""
        return False

    def rewrite(self, network: nn.Module, names: Collection[str]) -> None:  # noqa: B027 - some linears are called already
        """Let a copy of the network call the linears of this part, given the names of all parts."""

    def with_rows(self, rows: Mapping[str, int]) -> Self:
        """The same part with the vectors per sample that its last layer multiplies."""
        return replace(self, rows=rows[self.layers[-1]]) if self.layers else self

    def in_form(self, form: Form) -> Self:
        """The same part with its low-rank layers stored in a form, if it has any."""
        return self

    def stored(self, decomposition: Decomposition) -> dict[str, Tensor]:
        """The tensors that hold a decomposition in a file."""
        return packed(decomposition)

    def stored_shapes(self, linear: LinearLayer) -> dict[str, tuple[int, ...]]:
        """Shapes of the stored tensors of one of its linears."""
        left, right = (*linear.weight.shape[:-1], self.largest), (self.largest, linear.in_features)
        return {"left": left, "right": right, "energies": (self.largest,), "num_repaired": ()}

    def restored(self, linear: LinearLayer, tensors: Mapping[str, Tensor]) -> Decomposition:
        """The decomposition of a linear from stored tensors. Raises `ValueError` for values that it cannot have."""
        return unpacked(tensors)


@dataclass(frozen=True)
class Unit(Part):
    """A unit of a block, `width` wide; cost is proportional to rank."""

    width: int = 0

    is_unit = True

    def decompose(self, linear: nn.Module, factors: KroneckerFactors, row: float, col: float) -> Decomposition:
        return self.decompose_together([(linear, factors, row, col)])[0]

    @property
    def largest(self) -> int:
        return self.width

    def num_weights(self, rank: int | None) -> int:
        return self.dense if rank is None else self.dense // self.width * rank

    def rank_of_ratio(self, ratio: float) -> int:
        return max(1, math.floor(Fraction(str(ratio)) * self.width))


def candidate_ranks(lowest: int, highest: int, multiple: int, at_least: int) -> list[int]:
    """List the multiples of `multiple` between two ranks.

    If there are fewer than `at_least`, `multiple` is halved again and again, until every rank is listed.
    """
    while True:
        ranks = [rank for rank in range(multiple, highest + 1, multiple) if rank >= lowest]
        if len(ranks) >= at_least or multiple == 1:
            return ranks
        multiple //= 2


@dataclass(frozen=True)
class Found:
    """Parts of one module, and by layer the reason why others are in none.

    After each of two `changes` of the module `within` (default: of the network), the whole network computes the same
    unless other code of it sees what the module holds.
    """

    parts: tuple[Part, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    changes: tuple["Change", ...] = ()
    within: str = ""

    def without_parts(self, reason: str) -> "Found":
        """The same with no parts, for a reason."""
        names = [name for part in self.parts for name in part.layers or (part.name,)]
        return Found(reasons=self.reasons | dict.fromkeys(names, reason))


class Kind(ABC):
    """A kind of part: how to recognise it in a network."""

    results: ClassVar[int] = 0
    """Raised with every change that changes numbers of this kind alone; RESULTS stands for all others."""

    def protecting(self, protected: int | None, constant: Mapping[str, Any] | None) -> Self:
        """The same kind with a number of tokens at the front that parts leave alone.

        None finds out, by the rows of modules' inputs that are `constant` (`Probe`).
        """
        return self

    def sample(self, inputs: Any) -> Any:
        """The inputs with which a network runs for its parts to be found."""
        return inputs

    @abstractmethod
    def layers_of(self, owner: str, module: nn.Module) -> list[str] | None:
        """Names of the linear layers of a module that looks like a holder of such parts, or None."""

    @abstractmethod
    def find(self, model: nn.Module, owner: str, call: Call | None) -> Found:
        """Find the parts of a module that looks like a holder, by computing with the arguments of one `call`."""

    @abstractmethod
    def at(self, model: nn.Module, name: str) -> Part | None:
        """The part with a name, without computing; None if there is none of this kind."""

    def described(self, model: nn.Module) -> dict[str, Description]:
        """Descriptions of the parts of this kind in a compressed network, by name."""
        return {}

    def linked(self, model: nn.Module, found: list[Part], reasons: dict[str, str]) -> list[Part]:
        """Relate the parts of this kind to all that were found; the others' `reasons` may be changed."""
        return found


NOT_CALLED = "no unit: the module that holds it is not called, as if its code were copied or compiled elsewhere"
USED_ELSEWHERE = "no unit: other code of the network reads or changes what this module computes"

SAME = 1e-5  # relative error in float64 of code that rounds to float32 in between

Change = Callable[[nn.Module], None]


@torch.no_grad()
def computes_the_same(module: nn.Module, call: Call | None, *changes: Change) -> bool:
    """Whether a module gives the same outputs, in float64, for the arguments of a call after each of two `changes`."""
    if call is None:
        return False
    outputs = []
    for change in changes:
        changed, (args, kwargs) = in_float64(module, call)
        try:
            change(changed)
            leaves = tree_leaves(changed(*args, **kwargs))
            outputs.append(next(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        except Exception:  # from anyone's code
            return False
    return are_same(*outputs)


def in_float64(module: nn.Module, call: Call) -> tuple[nn.Module, Call]:
    """A copy of a module in evaluation mode, and the arguments of a call, in float64."""
    call = tree_map_only(Tensor, lambda each: each.double() if each.is_floating_point() else each, call)
    return copy_with(module).double().eval(), call


def are_same(one: Tensor, other: Tensor) -> bool:
    """Whether outputs in float64 are equal but for rounding."""
    return bool(torch.linalg.vector_norm(one - other) <= SAME * torch.linalg.vector_norm(one))


def module_at(model: nn.Module, name: str) -> nn.Module | None:
    """The submodule with a name, which may be anything; None if there is none."""
    try:
        return model.get_submodule(name) if name else None
    except AttributeError:
        return None


def centred_inputs(batch: LayerBatch, decomposition: Decomposition) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs relative to the mean that the bias absorbs, and both factors in their type."""
    x = batch.x
    left, right = decomposition.left.to(x), decomposition.right.to(x)
    return x if decomposition.mean is None else x - decomposition.mean.to(x), left, right


def packed(decomposition: Decomposition) -> dict[str, Tensor]:
    """The tensors of a decomposition by field."""
    return {name: torch.as_tensor(value) for name, value in vars(decomposition).items() if value is not None}


def unpacked(tensors: Mapping[str, Tensor]) -> Decomposition:
    """The decomposition from its tensors by field."""
    fields: dict[str, Any] = {**tensors, "num_repaired": int(tensors["num_repaired"])}
    return Decomposition(**fields)
