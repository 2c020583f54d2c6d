"""ASVD: one threshold on the measured divergence (STRS, Yuan et al., 2023)."""

from bisect import bisect_left

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from facts.search.base import Plan, Ratios, Search, SearchResult
from facts.search.problem import AllocationProblem
from facts.search.sensitivity.measured import Sensitivity


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class ASVDSearch(Search):
    """All pairs of a layer and a ratio are sorted by falling error; a cut is moved until the budget is met.

    A layer takes its smallest ratio behind the cut, or stays dense if it has none. Errors are of the output (KL, the
    paper's choice, instead of the original's cross-entropy). If even the smallest ratios cost too much, they are the
    plan.
    """

    ratios: Ratios = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        sensitivity = Sensitivity(problem)
        offered = problem.ranks_of_ratios(self.ratios)
        profile = sensitivity.profile(offered)
        entries = [(profile[name][rank], name, rank) for name, ranks in offered.items() for rank in ranks]
        entries.sort(key=lambda entry: -entry[0])

        def plan(cut: int) -> Plan:
            ranks: Plan = dict.fromkeys(problem.layers)
            for _, name, rank in entries[cut:]:
                ranks[name] = min(rank, ranks[name] or rank)
            return ranks

        # The cost rises with the cut: the last one that fits, or 0 if none does.
        cut = bisect_left(range(1, len(entries) + 1), True, key=lambda cut: not problem.fits(plan(cut)))
        return SearchResult(plan(cut), profile=profile, saved_seconds=sensitivity.saved_seconds)
