"""FLAR-SVD: one threshold on the error of the last features (Thoma et al., 2025)."""

import math

from facts.parts import Plan
from facts.search.base import AllocationProblem, Profile, Search, SearchResult
from facts.search.sensitivity_measured import Sensitivity
from facts.utils.options import Count, options

WIDEST = (1e-12, 1e6)  # thresholds between which every relative error lies
CLOSE = 1.001


@options
class FLARSearch(Search):
    """Each layer takes the smallest rank whose error stays under one threshold, or stays dense if none does.

    The error is the relative squared error of the last linear layer's inputs; ranks are multiples of `rank_multiple`,
    found by binary search. A second binary search finds the smallest threshold that meets the budget, in at most
    `num_thresholds` steps. If none does, every layer takes its smallest rank.
    """

    rank_multiple: Count = 8
    num_thresholds: Count = 40

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        offered = problem.candidate_ranks(self.rank_multiple, at_least=5, between=(0, 1))
        sensitivity = Sensitivity(problem, of="features")
        low, high = WIDEST
        used: Profile = {name: {} for name in offered}
        best: Plan = {name: ranks[0] for name, ranks in offered.items()}
        for _ in range(self.num_thresholds):
            if high / low < CLOSE:
                break
            threshold = math.sqrt(low * high)
            plan = _equal_error(sensitivity, offered, threshold, used)
            if problem.fits(plan):
                best, high = plan, threshold
            else:
                low = threshold
        return SearchResult(best, profile=used)


def _equal_error(sensitivity: Sensitivity, offered: dict[str, list[int]], threshold: float, used: Profile) -> Plan:
    """Find each layer's rank by binary search; the searches advance in step and share their passes."""
    low, high = dict.fromkeys(offered, 0), {name: len(ranks) for name, ranks in offered.items()}
    while searching := [name for name in offered if low[name] < high[name]]:
        middle = {name: (low[name] + high[name]) // 2 for name in searching}
        errors = sensitivity.profile({name: [offered[name][middle[name]]] for name in searching})
        for name in searching:
            used[name] |= errors[name]
            (error,) = errors[name].values()
            if error <= threshold:
                high[name] = middle[name]
            else:
                low[name] = middle[name] + 1
    return {name: ranks[low[name]] if low[name] < len(ranks) else None for name, ranks in offered.items()}
