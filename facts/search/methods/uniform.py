"""Uniform: the same ratio for every layer (paper, section 5.1)."""

from facts.search.base import AllocationProblem, Search, SearchResult
from facts.utils.options import Count, options


@options
class Uniform(Search):
    """Keep the same fraction of every layer: the ratio of the tightest bound.

    If that exceeds a latency bound, the fraction is the largest number of thousandths that meets it. FLOPs and
    parameters have the same ratio, since each token is multiplied by each weight once. Ranks are multiples of
    `rank_multiple` if layers are wide enough: rounded down, then up within the budget, first where most was lost.
    """

    chooses_tokens = True

    rank_multiple: Count = 1

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        return SearchResult(dict(self.ranks(problem)))

    def ranks(self, problem: AllocationProblem) -> dict[str, int]:
        """Ranks of all layers; none stays dense."""
        ranks = problem.at_common_ratio(
            lambda ratio: {name: part.rank_of_ratio(ratio) for name, part in problem.parts.items()}
        )
        plan = {name: rank - rank % self.rank_multiple or rank for name, rank in ranks.items()}
        for name in sorted(ranks, key=lambda name: plan[name] - ranks[name]):
            higher = plan[name] + self.rank_multiple
            worthwhile = plan[name] < ranks[name] and higher <= problem.full_rank(name)
            if worthwhile and problem.fits(plan | {name: higher}):
                plan[name] = higher
        return plan
