"""CoRS: measured sensitivities and an integer program (paper, section 4.3).

The KL divergence of the network's output is measured at five ratios per layer and interpolated; the program finds the
best ranks within the budget.
"""

from facts.cost.ranks import candidate_ranks, ranks_between
from facts.search.base import MILPSearch, Ratios, SearchResult
from facts.search.problem import AllocationProblem
from facts.search.sensitivity.interpolation import Interpolation, interpolate_profile
from facts.search.sensitivity.measured import Sensitivity
from facts.utils.options import Count, options


@options
class CoRS(MILPSearch):
    """Measure each layer's error at several `ratios` and interpolate it to the multiples of `rank_multiple` in between.

    `points_between` instead sets the number of evenly spaced ranks between every two measured ones (paper, section
    5.1: 20; its figure has the multiples of 8). `interpolation: none` offers only the measured ranks.
    """

    rank_multiple: Count = 8
    ratios: Ratios = (0.1, 0.3, 0.5, 0.7, 0.9)
    points_between: Count | None = None
    interpolation: Interpolation = "windows"

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        ranks = problem.ranks_of_ratios(self.ratios)
        measured = errors = Sensitivity(problem).profile(ranks)
        if self.interpolation != "none":
            errors = {name: self._interpolated(ranks[name], measured[name]) for name in ranks}
        plan, solution = self.solve(problem, errors)
        return SearchResult(plan, solution, measured, predicted=solution.error, offered=errors)

    def _interpolated(self, ranks: list[int], errors: dict[int | None, float]) -> dict[int | None, float]:
        """Interpolate the measured errors to all ranks that are offered."""
        if self.points_between:
            offered = ranks_between(ranks, self.points_between)
        else:
            offered = candidate_ranks(ranks[0], ranks[-1], self.rank_multiple, at_least=len(self.ratios))
        # Over ranks; for plain layers this equals interpolation over ratios, since parabolas and distances scale alike.
        found = interpolate_profile(ranks, [errors[rank] for rank in ranks], offered, self.interpolation)
        return dict(zip(offered, found.tolist(), strict=True))
