"""MemViT: the energy of the singular values, greedily (Azizi et al., 2024)."""

import math
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from facts.search.base import Search, SearchResult
from facts.search.methods.uniform import Uniform
from facts.search.problem import AllocationProblem


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class MemViTSearch(Search):
    """Starting from the uniform plan, ranks move from the layers that lose least energy to the one that gains most.

    A layer's energy is the share of its singular values (not squared) that it keeps. At iteration i the portion moved
    is `first_step · exp(-i / decay)` of a layer's full rank, but at least one component; gains and losses are taken per
    unit of cost, a component costing the same at every rank. A move that does not raise the total energy is not made.
    """

    decay: Annotated[float, Field(gt=0)] = 80.0
    num_iterations: Annotated[int, Field(ge=1)] = 500
    first_step: Annotated[float, Field(gt=0, le=1)] = 0.1

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        kept = {name: _kept_energy(problem, name) for name in problem.layers}
        full = {name: problem.full_rank(name) for name in problem.layers}
        component = {name: problem.share(name, full[name]) / full[name] for name in problem.layers}
        ranks = Uniform().ranks(problem)
        for iteration in range(self.num_iterations):
            portion = self.first_step * math.exp(-iteration / self.decay)
            steps = {name: max(1, round(portion * full[name])) for name in problem.layers}

            def energy_per_cost(name: str, low: int, high: int) -> float:
                return (kept[name][high] - kept[name][low]) / ((high - low) * component[name])

            takers = [name for name in ranks if ranks[name] + steps[name] <= full[name]]
            if not takers:
                break
            taker = max(takers, key=lambda name: energy_per_cost(name, ranks[name], ranks[name] + steps[name]))
            moved = {**ranks, taker: ranks[taker] + steps[taker]}
            while not problem.fits(moved):
                givers = [name for name in moved if name != taker and moved[name] > steps[name]]
                if not givers:
                    break
                giver = min(givers, key=lambda name: energy_per_cost(name, moved[name] - steps[name], moved[name]))
                moved[giver] -= steps[giver]
            if problem.fits(moved) and _total(kept, moved) > _total(kept, ranks):
                ranks = moved
        return SearchResult(dict(ranks))


def _kept_energy(problem: AllocationProblem, name: str) -> list[float]:
    """The share of the singular values' sum that each rank 0 .. k keeps."""
    values = problem.decompositions[name].energies.sqrt()
    return [0.0, *(values.cumsum(dim=0) / values.sum()).tolist()]


def _total(kept: dict[str, list[float]], ranks: dict[str, int]) -> float:
    return math.fsum(kept[name][rank] for name, rank in ranks.items())
