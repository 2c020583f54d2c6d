"""MemViT: the layer that has lost the least energy is cut next, in ever smaller steps (Azizi et al., 2024)."""

import itertools
import math

from torch import Tensor

from facts.moments.statistics import at_least_tiny
from facts.search.base import AllocationProblem, Search, SearchResult
from facts.search.methods.uniform import Uniform
from facts.utils.options import Positive, Share, options


@options
class MemViTSearch(Search):
    """Start from ranks at which layers cost as much as dense, and cut one layer at a time until the budget is met.

    Step t removes at least N(t) - N(t + 1), in whole components, with N(t) = N* + (N0 - N*) exp(-t / decay), N0
    the dense cost and N* the budget. It cuts the layer that would have lost the least energy after the cut, measured as
    a share of its singular values, or of their squares if `squared` (the paper tried both). A layer keeps at least
    `least_ratio` of its full rank, or its uniform rank if that is lower.
    """

    decay: Positive = 80.0
    least_ratio: Share = 0.1
    squared: bool = False

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        lost = {name: _lost_energy(problem.energies(name), self.squared) for name in problem.parts}
        full = {name: problem.full_rank(name) for name in problem.parts}
        cost = {name: [problem.share(name, rank) for rank in range(1, full[name] + 1)] for name in full}
        uniform = Uniform().ranks(problem)
        least = {name: min(uniform[name], max(1, int(self.least_ratio * rank))) for name, rank in full.items()}
        surplus = sum(1 - budget / dense for budget, dense in zip(problem.budget, problem.dense, strict=True))
        ranks = dict(full)
        for step in itertools.count():
            portion = surplus * (math.exp(-step / self.decay) - math.exp(-(step + 1) / self.decay))
            cut = {name: rank for name, rank in ranks.items() if rank > least[name]}
            lower = {name: lowered(rank, least[name], cost[name], portion) for name, rank in cut.items()}
            if problem.fits(ranks) or not lower:
                break
            layer = min(lower, key=lambda name: lost[name][lower[name]])
            ranks[layer] = lower[layer]
        return SearchResult(dict(ranks))


def lowered(rank: int, least: int, cost: list[float], portion: float) -> int:
    """The next rank that costs less by at least `portion`, given the costs of ranks 1, 2, ...; `least` if none does."""
    return next((lower for lower in range(rank - 1, least, -1) if cost[rank - 1] - cost[lower - 1] >= portion), least)


def _lost_energy(energies: Tensor, squared: bool) -> list[float]:
    """The share of the sum of singular values, or of their squares, that each rank 0 .. k loses."""
    values = energies if squared else energies.sqrt()
    return [1.0, *(1 - values.cumsum(dim=0) / at_least_tiny(values.sum())).tolist()]
