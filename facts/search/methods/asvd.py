"""ASVD: one threshold on the measured divergence (STRS, Yuan et al., 2023)."""

from facts.search.base import Ratios, Search, SearchResult
from facts.search.problem import AllocationProblem
from facts.search.sensitivity.measured import Sensitivity
from facts.search.threshold import plan_behind_cut
from facts.utils.options import options


@options
class ASVDSearch(Search):
    """Each layer takes the smallest of its `ratios` whose error stays under a threshold, or stays dense if none does.

    Errors are of the output (KL, the paper's choice, instead of the original's cross-entropy). The threshold is the
    smallest that meets the budget. If even the smallest ratios cost too much, they are the plan.
    """

    ratios: Ratios = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        sensitivity = Sensitivity(problem)
        profile = sensitivity.profile(problem.ranks_of_ratios(self.ratios))
        plan = plan_behind_cut(problem, profile)
        return SearchResult(plan, profile=profile, saved_seconds=sensitivity.saved_seconds)
