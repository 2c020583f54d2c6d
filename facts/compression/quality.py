"""Budgets by quality: the smallest network whose outputs stay close enough to the original's."""

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from facts.calibration.prepare import Calibration
from facts.compression.comparison import with_distance
from facts.cost.count import CostName
from facts.result import CompressionResult
from facts.search.budget import Budget
from facts.utils.files import ScratchFolder

log = logging.getLogger(__name__)

HUNDREDTHS = range(10, 100)  # most searches leave every layer at least a tenth


def smallest_within(
    error: float,
    calibration: Calibration,
    rounds: tuple[float, ...] | None,
    cost: CostName,
    compress_to: Callable[..., CompressionResult],
) -> CompressionResult:
    """Find the smallest ratio, in hundredths, at which outputs are within `error` of the original's, by bisection.

    Raises `ValueError` without data, and if even the largest ratio exceeds the error.
    """
    if calibration.data is None:
        raise ValueError("error compares outputs on calibration data: give some, or a ratio")
    scratch = ScratchFolder()  # one decomposition serves all ratios
    cached = calibration if calibration.cache else calibration.cached_in(scratch.path)
    *smaller, largest = HUNDREDTHS
    results: dict[int, CompressionResult] = {}

    def suffices(hundredths: int) -> bool:
        budget = replace(Budget.of(hundredths / 100, cost), rounds=rounds)
        try:
            results[hundredths] = with_distance(compress_to(cached, budget=budget), cached)
        except ValueError as reason:
            if hundredths == largest:
                raise
            log.info("%d%% of the %s: %s", hundredths, cost, reason)
            return False
        distance = results[hundredths].summary.distance
        if distance is None:
            raise ValueError("error is measured on held-out samples, but there are too few: give at least 4 samples")
        log.info("%d%% of the %s: %s", hundredths, cost, distance)
        return distance.mean <= error

    if not suffices(largest):
        found = results[largest].summary.distance
        raise ValueError(f"even with {largest}% of the {cost}, {found}: allow an error of more than {error:g}")
    result = results[HUNDREDTHS[bisect_left(smaller, True, key=suffices)]]
    return replace(result, summary=replace(result.summary, allowed_error=error))
