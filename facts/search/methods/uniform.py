"""Uniform: the same ratio for every layer (paper, section 5.1)."""

from facts.search.base import Search, SearchResult
from facts.search.problem import AllocationProblem
from facts.utils.options import Count, options


@options
class Uniform(Search):
    """Every layer keeps the same fraction, that of the tightest bound.

    If a latency needs less, it is the largest number of thousandths that meets it too. FLOPs and parameters have the
    same ratio, since each token meets each weight once. Ranks are multiples of `rank_multiple` if layers are wide
    enough: rounded down, then up within the budget, first for the layers that lost most.
    """

    rank_multiple: Count = 1

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        return SearchResult(dict(self.ranks(problem)))

    def ranks(self, problem: AllocationProblem) -> dict[str, int]:
        """Ranks of all layers; none stays dense."""
        ranks = problem.at_common_ratio(
            lambda ratio: {name: problem.rank_of_ratio(name, ratio) for name in problem.parts}
        )
        plan = {name: rank - rank % self.rank_multiple or rank for name, rank in ranks.items()}
        for name in sorted(ranks, key=lambda name: plan[name] - ranks[name]):
            higher = plan[name] + self.rank_multiple
            worthwhile = plan[name] < ranks[name] and higher <= problem.full_rank(name)
            if worthwhile and problem.fits(plan | {name: higher}):
                plan[name] = higher
        return plan
