"""Budgets by quality: the smallest network whose outputs stay close enough to the original's."""

import logging
from bisect import bisect_left
from collections.abc import Callable

from facts.cost.count import CostName
from facts.result import CompressionResult

log = logging.getLogger(__name__)

HUNDREDTHS = range(10, 100)  # most searches leave every layer at least a tenth


def smallest_within(
    error: float, cost: CostName, compare_at: Callable[[float], CompressionResult]
) -> CompressionResult:
    """Find the smallest ratio, in hundredths, at which outputs are within `error` of the original's, by bisection.

    `compare_at(ratio)` compresses and compares. Raises `ValueError` if even the largest ratio exceeds the error.
    """
    *smaller, largest = HUNDREDTHS
    results: dict[int, CompressionResult] = {}

    def suffices(hundredths: int) -> bool:
        try:
            results[hundredths] = compare_at(hundredths / 100)
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
    return results[HUNDREDTHS[bisect_left(smaller, True, key=suffices)]]
