"""ASVD: one threshold on the measured divergence (STRS, Yuan et al., 2023)."""

from bisect import bisect_left
from typing import Literal

from facts.moments.losses import SampledTargets
from facts.parts import Plan
from facts.search.base import AllocationProblem, Ratios, Search, SearchResult
from facts.search.sensitivity_measured import Sensitivity
from facts.utils.options import options


@options
class ASVDSearch(Search):
    """Each layer takes the smallest of its `ratios` whose error stays under a threshold, or stays dense if none does.

    Errors are measured `of` the output (KL, the paper's choice) or of the loss on given labels (cross-entropy, that of
    the original). The threshold is the smallest that meets the budget; if none does, every layer takes its smallest
    ratio.
    """

    of: Literal["output", "loss"] = "output"
    ratios: Ratios = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        if self.of == "loss" and isinstance(problem.prepared.loss, SampledTargets):
            raise ValueError('there are no labels to measure the loss on: give some, or choose of="output"')
        profile = Sensitivity(problem, self.of).profile(problem.ranks_of_ratios(self.ratios))
        entries = [(error, name, rank) for name, errors in profile.items() for rank, error in errors.items() if rank]
        entries.sort(key=lambda entry: -entry[0])

        def plan(cut: int) -> Plan:
            """Each layer's smallest rank after a cut through all ranks, sorted by falling error."""
            ranks: Plan = dict.fromkeys(problem.parts)
            for _, name, rank in entries[cut:]:
                ranks[name] = min(rank, ranks[name] or rank)
            return ranks

        # The cost rises with the cut, so bisection finds the last cut that fits, or 0 if none does.
        cut = bisect_left(range(1, len(entries) + 1), True, key=lambda cut: not problem.fits(plan(cut)))
        return SearchResult(plan(cut), profile=profile)
