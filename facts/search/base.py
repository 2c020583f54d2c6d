"""Interface of a search, and the problem it solves: parts, their decompositions and a budget."""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from facts.calibration.data import Data
from facts.calibration.prepared_model import PreparedModel
from facts.cost.count import CostName
from facts.cost.timing import LatencyTable
from facts.decomposition.truncation import Decomposition
from facts.estimators.base import Estimator
from facts.parts import Part
from facts.parts.base import Plan
from facts.search.integer_program import Allocation
from facts.utils.cache import Cache, file_name
from facts.utils.options import Ratio, options

RANGE = (0.1, 0.9)  # ratios of a part from which most searches choose


@dataclass(frozen=True)
class AllocationProblem:
    """A prepared network, its layers' decompositions by an estimator, and `bounds`: the ratio of each cost to keep.

    FLOPs and parameters are counted over the parts; latency is that of the whole network, predicted by `latency`.
    `sensitivity` holds batches on which a changed network is compared with the original.
    """

    prepared: PreparedModel
    estimator: Estimator
    decompositions: Mapping[str, Decomposition]
    bounds: Mapping[CostName, float]
    latency: LatencyTable | None = None
    sensitivity: Data | None = None

    @property
    def model(self) -> nn.Module:
        return self.prepared.model

    @property
    def parts(self) -> dict[str, Part]:
        return self.prepared.parts

    @property
    def layers(self) -> dict[str, nn.Linear]:
        """The layers, if the parts are layers. Raises `ValueError` for units."""
        return self.prepared.layers

    @property
    def device(self) -> torch.device:
        return self.prepared.device

    @cached_property
    def cache(self) -> Cache | None:
        """The cache for errors of this network with these decompositions, if there is one."""
        cache = self.prepared.cache if self.prepared.execution.cache_errors else None
        return cache and Cache(cache.folder / file_name(self.estimator))

    def sensitivity_batches(self) -> Data:
        """The sensitivity data. Raises `ValueError` if there are none."""
        if self.sensitivity is None:
            raise ValueError("this search compares outputs: give calibration or sensitivity data")
        return self.sensitivity

    def training_batches(self) -> Data:
        """The calibration data. Raises `ValueError` if there are none."""
        if self.prepared.data is None:
            raise ValueError("this search trains on calibration data: give some")
        return self.prepared.data

    def cost(self, name: str, rank: int | None, plan: Mapping[str, int | None] | None = None) -> tuple[float, ...]:
        """Cost of a part at a rank (None for dense), one value per bound: integers except for latency.

        It may depend on the `plan` of the parts before it; without one, these are dense.
        """
        part = self.parts[name]
        costs: dict[CostName, float] = {"flops": part.flops(rank, plan or {}), "params": part.num_weights(rank)}
        if "latency" in self.bounds:
            assert self.latency is not None
            costs["latency"] = self.latency.seconds(name, rank, plan or {})
        return tuple(costs[bound] for bound in self.bounds)

    def spent(self, plan: Mapping[str, int | None]) -> tuple[float, ...]:
        return tuple(map(math.fsum, zip(*(self.cost(name, rank, plan) for name, rank in plan.items()), strict=True)))

    @cached_property
    def dense(self) -> tuple[float, ...]:
        return self.spent(dict.fromkeys(self.parts))

    @cached_property
    def budget(self) -> tuple[float, ...]:
        """The cost allowed for the layers, with ratios as exact decimals: 0.7 of 10 is 7.

        Raises `ValueError` for a latency that leaves no time for the layers.
        """
        return tuple(
            self._latency_budget(ratio) if name == "latency" else math.floor(Fraction(str(ratio)) * Fraction(dense))
            for (name, ratio), dense in zip(self.bounds.items(), self.dense, strict=True)
        )

    def _latency_budget(self, ratio: float) -> float:
        assert self.latency is not None
        dense, rest = self.latency.dense, self.latency.rest
        budget = ratio * dense - rest
        if budget <= 0:
            raise ValueError(
                f"of the network's {1000 * dense:.4g} ms, {1000 * rest:.4g} are outside the layers to compress: "
                f"{1000 * ratio * dense:.4g} ms, a ratio of {ratio:.3g}, cannot be met; allow more than that"
            )
        return budget

    def fits(self, plan: Mapping[str, int | None]) -> bool:
        return all(spent <= budget for spent, budget in zip(self.spent(plan), self.budget, strict=True))

    def refuse_too_small(self, least: Mapping[str, int | None], who: str) -> None:
        """Raises `ValueError` for a bound, latency apart, below the cost of the `least` ranks."""
        counted = replace(self, bounds={name: ratio for name, ratio in self.bounds.items() if name != "latency"})
        for (name, ratio), spent, budget, dense in zip(
            counted.bounds.items(), counted.spent(least), counted.budget, counted.dense, strict=True
        ):
            if spent > budget:
                lowest, parts = math.ceil(100 * spent / dense) / 100, self.prepared.kinds.replace(",", " and ")
                whole = getattr(self.prepared.cost, name)
                of_all = "" if whole is None else f" (of the whole network {whole - (1 - lowest) * dense:.4g})"
                raise ValueError(
                    f"a ratio of {ratio:.3g} of the {name} is too little: {who} needs at least {lowest:g} with "
                    f"{parts}{of_all}"
                )

    def share(self, name: str, rank: int | None) -> float:
        """A layer's cost as a share of the dense cost of all layers, summed over the bounds."""
        return sum(cost / dense for cost, dense in zip(self.cost(name, rank), self.dense, strict=True))

    def full_rank(self, name: str) -> int:
        """The largest rank at which a layer costs no more than dense (ratio 1), or 1 if there is none."""
        return max(1, self.parts[name].full_rank)

    def ranks_of_ratios(self, ratios: Collection[float]) -> dict[str, list[int]]:
        """The ranks of several ratios for each layer, in ascending order and without duplicates."""
        return {name: sorted({part.rank_of_ratio(ratio) for ratio in ratios}) for name, part in self.parts.items()}

    def at_common_ratio(self, ranks: Callable[[float], dict[str, int]]) -> dict[str, int]:
        """The `ranks` at the tightest bound's ratio or, if latency allows less, at the largest ratio in thousandths.

        With tokens it is always the latter.
        """
        largest = ranks(min(self.bounds.values()))
        products = self.prepared.has_tokens  # costs are products of ratios
        if products or ("latency" in self.bounds and not self.fits(largest)):
            too_slow = bisect_left(range(1, 1000), True, key=lambda i: not self.fits(ranks(i / 1000)))
            largest = ranks(too_slow / 1000)
        return largest

    def energies(self, name: str) -> Tensor:
        """Energies of a part's components `[k]` in float64, summed over the heads of a unit."""
        energies = [self.decompositions[linear].energies.double() for linear in self.parts[name].linears]
        return torch.stack(energies).sum(dim=0)

    def candidate_ranks(
        self, multiple: int, at_least: int, between: tuple[float, float] = RANGE
    ) -> dict[str, list[int]]:
        """The ranks to choose from for each layer: multiples of `multiple` with ratios `between` two values."""
        return {name: part.candidates(multiple, at_least, between) for name, part in self.parts.items()}


Profile = dict[str, dict[int | None, float]]
"""Error of each layer, by name, at each rank; the dense layer (None) has error 0 unless it is listed."""

Ratios = Annotated[tuple[Ratio, ...], Field(min_length=1)]


@dataclass(frozen=True)
class SearchResult:
    """A rank plan, the solver's answer if there is one, and the sensitivity profile that the plan is based on.

    `predicted` is the mean error of the outputs that the search predicts, if it predicts one. If the search also trains
    weights, its `decompositions` replace those of the problem. `offered` holds the errors at all ranks that an integer
    program chose from; at another budget it chooses from the same ones.
    """

    plan: Plan
    solution: Allocation | None = None
    profile: Profile = field(default_factory=dict)
    predicted: float | None = None
    decompositions: Mapping[str, Decomposition] | None = None
    offered: Profile = field(default_factory=dict)


@options
class Search(ABC):
    """A method that chooses ranks within a budget; by default it compares outputs on `num_samples` samples."""

    num_samples: ClassVar[int] = 512
    chooses_tokens: ClassVar[bool] = False
    """Whether it can plan parts whose ranks change the cost of others."""

    def least(self, part: Part) -> int:
        """The smallest rank that it would give a part."""
        return part.least

    @abstractmethod
    def allocate(self, problem: AllocationProblem) -> SearchResult:
        """Choose a rank for each layer. The budget is below the dense cost; `compress` handles larger budgets."""
