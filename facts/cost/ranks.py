"""Ranks and their shares of a layer's cost."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np


def break_even_rank(d_out: int, d_in: int) -> int:
    """The rank at which two factors cost as much as the layer."""
    return d_out * d_in // (d_out + d_in)


def rank_of_ratio(d_out: int, d_in: int, ratio: float) -> int:
    """The rank whose factors cost at most `ratio` of the layer, but at least 1 (paper, section 5.1)."""
    return max(1, int(break_even_rank(d_out, d_in) * ratio))


def candidate_ranks(full_rank: int, multiple: int, at_least: int, between: Sequence[float] = (0.1, 0.9)) -> list[int]:
    """The ranks to choose from: multiples of `multiple` whose share of the full rank lies within `between`.

    If a layer is too narrow for `at_least` of them, `multiple` is halved, and so on down to every rank; if it is too
    narrow for any, only rank 1 remains.
    """
    low, high = (bound * full_rank for bound in between)
    while True:
        ranks = [rank for rank in range(multiple, full_rank + 1, multiple) if low <= rank <= high]
        if len(ranks) >= at_least or multiple == 1:
            return ranks or [1]
        multiple //= 2


def ranks_between(ranks: Sequence[int], num_points: int) -> list[int]:
    """The ranks with so many more between every two neighbours, evenly spaced and rounded, each once."""
    points = [np.linspace(low, high, num_points + 2) for low, high in pairwise(ranks)]
    return sorted({*ranks, *np.rint(points).astype(int).ravel().tolist()})
