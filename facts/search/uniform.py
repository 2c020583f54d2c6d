"""Uniform: the same ratio for every layer."""

from bisect import bisect_left

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from facts.search.base import AllocationProblem, Plan, Search, SearchResult, rank_of_ratio


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Uniform(Search):
    """Every layer keeps the same fraction, that of the tightest bound; or, where a latency asks for less, the largest
    number of thousandths at which that holds too.

    The two factors of a layer cost `rank (d_in + d_out)` for each token as well as in parameters, so one plan meets the
    ratio in FLOPs and in parameters alike.
    """

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        def plan(ratio: float) -> Plan:
            return {
                name: rank_of_ratio(layer.out_features, layer.in_features, ratio)
                for name, layer in problem.layers.items()
            }

        tightest = plan(min(problem.bounds.values()))
        if "latency" not in problem.bounds or problem.fits(tightest):
            return SearchResult(tightest)
        too_slow = bisect_left(range(1, 1000), True, key=lambda thousandths: not problem.fits(plan(thousandths / 1000)))
        return SearchResult(plan(too_slow / 1000))
