"""Ranks that a search offers."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np


def candidate_ranks(lowest: int, highest: int, multiple: int, at_least: int) -> list[int]:
    """List the multiples of `multiple` between two ranks.

    If there are fewer than `at_least`, `multiple` is halved again and again, until every rank is listed.
    """
    while True:
        ranks = [rank for rank in range(multiple, highest + 1, multiple) if rank >= lowest]
        if len(ranks) >= at_least or multiple == 1:
            return ranks
        multiple //= 2


def ranks_between(ranks: Sequence[int], num_points: int) -> list[int]:
    """Add `num_points` ranks between every two neighbours, evenly spaced and rounded, without duplicates."""
    points = [np.linspace(low, high, num_points + 2) for low, high in pairwise(ranks)]
    return sorted({*ranks, *np.rint(points).astype(int).ravel().tolist()})
