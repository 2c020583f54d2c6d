"""Uniform: the same ratio for every layer."""

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from facts.search.base import AllocationProblem, Plan, Search, rank_of_ratio


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Uniform(Search):
    """Every layer keeps the same fraction; at ratio 1 every layer stays dense.

    The two factors of a layer cost `rank (d_in + d_out)` for each token as well as in parameters, so one plan meets the
    ratio in FLOPs and in parameters alike.
    """

    def allocate(self, problem: AllocationProblem) -> Plan:
        if problem.ratio == 1:
            return dict.fromkeys(problem.layers)
        return {
            name: rank_of_ratio(layer.out_features, layer.in_features, problem.ratio)
            for name, layer in problem.layers.items()
        }
