"""Outcomes of single test samples: how a record stores them, and which methods they distinguish."""

from collections.abc import Sequence
from itertools import combinations
from math import inf, sqrt

import numpy as np
import scipy
from torch import Tensor

APART = 2.0  # standard errors


def packed(outcomes: Tensor) -> str:
    """Pack whether each sample counts `[N]` into hexadecimal digits; the first bit only marks the start."""
    return f"{int('1' + ''.join('01'[outcome] for outcome in outcomes.tolist()), 2):x}"


def unpacked(text: str) -> np.ndarray:
    """Restore the outcomes `[N]`."""
    return np.array([bit == "1" for bit in f"{int(text, 16):b}"[1:]])


def standard_error(outcomes: np.ndarray) -> float:
    """Compute the standard error of the percentage of outcomes `[N]` or `[draws, N]` that count, over the samples.

    This is the bootstrap's standard error in closed form.
    """
    means = np.atleast_2d(outcomes).mean(axis=0)
    return 100 * means.std(ddof=1) / sqrt(len(means))


def errors_apart(better: np.ndarray, worse: np.ndarray) -> float:
    """Compute how far apart two methods are on the same samples, `[N]` or `[draws, N]`, in standard errors.

    The error is over the samples (paired bootstrap) or, for several draws, over the draws if that is larger.
    """
    difference = np.atleast_2d(better.astype(float) - worse)
    over = [difference.mean(axis=axis) for axis in range(1 + (len(difference) > 1))]
    mean, error = difference.mean(), max(each.std(ddof=1) / sqrt(len(each)) for each in over)
    if not error:
        return mean * inf if mean else 0.0
    return float(mean / error)


def num_apart(methods: list[np.ndarray]) -> int:
    """Count the pairs of methods that lie more than two standard errors apart."""
    return sum(abs(errors_apart(*pair)) > APART for pair in combinations(methods, 2))


def mean_ranks(outcomes: Sequence[np.ndarray], counts: Sequence[np.ndarray]) -> np.ndarray:
    """Average the ranks of methods over columns `[draws, M]`, 1 for the most accurate; ties share a rank.

    For each column, `outcomes [M, N]` say which samples count, and `counts [draws, N]` how often each sample is drawn.
    """
    numbers = (drawn.astype(float) @ column.T for column, drawn in zip(outcomes, counts, strict=True))
    return np.mean([scipy.stats.rankdata(-number, axis=-1) for number in numbers], axis=0)
