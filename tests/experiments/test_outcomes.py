"""Outcomes of test samples: kept without loss, and errors that are those of the bootstrap."""

from math import inf

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.record import errors_apart, mean_ranks, packed, standard_error, unpacked

NUM_SAMPLES, NUM_RESAMPLES = 400, 20_000
# The spread of so many resamples is off by 1 / sqrt(2 * 20,000) = 0.5 %, and n - 1 for n makes 0.1 %.
TOLERANCE = 0.03


def right(count: int) -> np.ndarray:
    """The first so many of the samples count."""
    return np.arange(NUM_SAMPLES) < count


def bootstrapped(values: np.ndarray) -> float:
    """The spread of the mean over resamples."""
    chosen = np.random.default_rng(0).integers(len(values), size=(NUM_RESAMPLES, len(values)))
    return float(values[chosen].mean(axis=1).std())


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_outcomes_come_back_as_they_were(outcomes):
    assert unpacked(packed(torch.tensor(outcomes))).tolist() == outcomes


@pytest.mark.parametrize("count", [0, 20, 246, 392, NUM_SAMPLES])
def test_the_standard_error_is_the_bootstraps(count):
    assert standard_error(right(count)) == pytest.approx(100 * bootstrapped(1.0 * right(count)), rel=TOLERANCE)


def test_errors_apart_are_those_of_the_paired_bootstrap():
    draw = np.random.default_rng(1)
    better, worse = (draw.random(NUM_SAMPLES) < share for share in (0.7, 0.6))
    difference = 1.0 * better - worse
    found = errors_apart(better, worse)
    assert found == pytest.approx(difference.mean() / bootstrapped(difference), rel=TOLERANCE)
    assert found > 1 and errors_apart(worse, better) == -found
    assert errors_apart(right(200), right(200)) == 0 and errors_apart(right(NUM_SAMPLES), right(0)) == inf


def test_of_several_draws_the_larger_error_counts():
    draw = np.random.default_rng(1)
    better, worse = (draw.random((3, NUM_SAMPLES)) < share for share in ([[0.7], [0.7], [0.7]], [[0.6], [0.5], [0.2]]))
    means = (1.0 * better - worse).mean(axis=1)
    assert errors_apart(better, worse) == pytest.approx(means.mean() / (means.std(ddof=1) / 3**0.5))
    assert errors_apart(better[:1], worse[:1]) == errors_apart(better[0], worse[0])
    assert standard_error(better) == pytest.approx(100 * bootstrapped(better.mean(axis=0)), rel=TOLERANCE)


def test_mean_ranks_are_those_of_the_samples_drawn():
    """Three methods in two columns, each draw counted out by hand: the second repeats one sample and leaves others out.

    The second column has a sample more.
    """
    outcomes = [
        np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0]], dtype=bool),  # 3, 2, 2; drawn: 2, 2, 2
        np.array([[0, 0, 1, 1, 0], [1, 1, 1, 1, 0], [0, 0, 0, 0, 0]], dtype=bool),  # 2, 4, 0; drawn: 1, 3, 0
    ]
    counts = [np.array([[1, 1, 1, 1], [0, 2, 0, 1]]), np.array([[1, 1, 1, 1, 1], [0, 2, 0, 1, 2]])]
    assert mean_ranks(outcomes, counts).tolist() == [[1.5, 1.75, 2.75], [2.0, 1.5, 2.5]]
