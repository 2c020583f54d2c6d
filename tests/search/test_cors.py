import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from facts.search import interpolate_profile
from facts.search.methods.cors import METHODS
from tests.refusals import refused

# The points of the paper's figure of two layers of DeiT-B: what it drew, and the errors that were measured.
FIGURE = pd.read_csv(Path(__file__).with_name("paper_figure.csv"))
RATIOS = [0.1, 0.3, 0.5, 0.7, 0.9]
ERRORS = [3.0, 1.0, 0.5, 0.1, 0.02]

methods = pytest.mark.parametrize("method", METHODS)


def curve(panel, name):
    points = FIGURE[(FIGURE.panel == panel) & (FIGURE.curve == name)]
    return points.ratio.to_numpy(), points.error.to_numpy()


@pytest.mark.parametrize(
    ("panel", "method", "num_points"),
    [("attn.proj", "windows", 39), ("attn.qkv", "windows", 57), ("attn.proj", "cubic", 81), ("attn.qkv", "cubic", 81)],
)
def test_every_point_of_the_papers_figure(panel, method, num_points):
    ratios, errors = curve(panel, method)
    assert len(ratios) == num_points
    np.testing.assert_allclose(interpolate_profile(*curve(panel, "measured"), ratios, method), errors, rtol=1e-9)


@methods
def test_dense_layer_has_no_error(method):
    """Ratio 1, beside others and alone; a profile that was measured there too has the last word."""
    assert interpolate_profile(RATIOS, ERRORS, [0.9, 1.0], method).tolist() == pytest.approx([0.02, 0.0])
    assert interpolate_profile(RATIOS, ERRORS, [1.0], method).tolist() == [0.0]
    assert interpolate_profile([*RATIOS, 1.0], [*ERRORS, 0.01], [1.0], method).tolist() == pytest.approx([0.01])


@methods
@given(errors=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=7))
def test_measured_points_stay_what_they_are(method, errors):
    """Whether they fall or not: measured profiles are noisy."""
    ratios = np.linspace(0.1, 0.9, len(errors))
    np.testing.assert_allclose(interpolate_profile(ratios, errors, ratios, method), errors, rtol=1e-12, atol=1e-9)


class TestWindows:
    def test_the_smaller_total_decides(self):
        """A query does not choose for itself.

        Through (0, 0), (1, 0), (2, 2), (3, 1) run x (x - 1) and, from 1 on, 2 (x - 1) - 1.5 (x - 1) (x - 2). At 1.5 the
        first is nearer to the line (0.25 off against 0.375), but it is off by as much again at its other query.
        """
        assert interpolate_profile([0, 1, 2, 3], [0, 0, 2, 1], [0.5, 1.5]).tolist() == pytest.approx([-0.25, 1.375])

    def test_no_overshoot(self):
        """The purpose of windows: one cubic through all nine points of `qkv` falls below zero."""
        ratios, errors = curve("attn.qkv", "measured")
        queries = np.linspace(0.1, 0.9, 81)
        assert interpolate_profile(ratios, errors, queries, "cubic").min() < 0
        assert interpolate_profile(ratios, errors, queries, "windows").min() > 0


test_bad_points_and_queries = refused(
    ([], [], [0.5], "as many errors as ratios, and at least one"),
    ([0.1, 0.5], [1.0, math.nan], [0.5], "the profile holds NaN or infinity"),
    ([0.1, 0.5, 0.1], [3.0, 1.0, 2.0], [0.5], "every ratio may be given once"),
    ([0.1, 0.5], [3.0, 1.0], [0.3, 0.6], r"queries must lie within 0.1 .. 0.5 or be 1, got 0.3 .. 0.6"),
    ([8, 16, 24], [3.0, 1.0, 0.5], [1], r"queries must lie within 8.0 .. 24.0"),
    by=interpolate_profile,
)
