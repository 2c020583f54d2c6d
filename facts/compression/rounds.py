"""Rounds: units are narrowed in steps, and everything is measured again after each step.

A search adds up errors that were measured one by one at the current network; far from it, their sum is too small.
"""

import logging
from collections.abc import Callable, Mapping

from facts.calibration.prepare import Calibration
from facts.compression.allocation import search_plan
from facts.cost.count import CostName
from facts.parts import Plan
from facts.search.base import Search
from facts.search.problem import AllocationProblem

log = logging.getLogger(__name__)

FIRST = 0.7
PAYS_BELOW = 0.6
"""Units are measured again at `FIRST` if at most this ratio remains (results/defaults/units.md)."""


def rounds_to(bounds: Mapping[CostName, float], rounds: tuple[float, ...] | None, has_units: bool) -> list[float]:
    """Ratios to stop at on the way to the bounds, in descending order: the given ones, or the default."""
    if rounds is None:
        pays = has_units and "latency" not in bounds and min(bounds.values()) <= PAYS_BELOW
        return [FIRST] if pays else []
    if rounds and not has_units:
        raise ValueError('rounds are for units: choose parts="units" with them')
    if rounds and "latency" in bounds:
        raise ValueError("rounds are ratios of FLOPs or parameters: leave them out if latency is bounded")
    return sorted((ratio for ratio in rounds if ratio > min(bounds.values())), reverse=True)


def narrow_in_rounds(
    calibration: Calibration,
    search: Search,
    rounds: list[float],
    problem_at: Callable[[Calibration, float], AllocationProblem],
) -> tuple[Calibration, Plan]:
    """Narrow units at each ratio; return the calibration of the narrower network, and the ranks of its units.

    `problem_at` makes the problem of a calibration at a ratio of the original's cost. Layers outside units stay dense.
    """
    plan: Plan = {}
    for number, ratio in enumerate(rounds, start=1):
        log.info("round %d of %d: to %g of the cost", number, len(rounds) + 1, ratio)
        problem = problem_at(calibration, ratio)
        result = search_plan(problem, search)
        ranks = {name: rank if name in calibration.units else None for name, rank in result.plan.items()}
        plan |= {name: rank for name, rank in ranks.items() if rank is not None}
        model = problem.apply(ranks, result.decompositions or problem.decompositions)
        calibration = calibration.of_narrowed(model)
    return calibration, plan
