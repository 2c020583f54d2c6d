"""Figures: what is plotted is what the records say, and what is missing is said."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from experiments.config import Experiment
from experiments.drawings.sensitivity import INTERPOLATED_LAYERS
from experiments.figures import draw_figure
from experiments.record import Record
from experiments.reproduce import Place

RATIOS = np.arange(1, 10) / 10


def record(scale: float = 1.0) -> Record:
    """Two layers of full rank 200 whose errors are powers of ten."""
    profile = [[round(200 * ratio), ratio, scale * 10 ** (-5 * ratio)] for ratio in RATIOS]
    return Record("f", "done", {}, "m", "d", profile=dict.fromkeys(INTERPOLATED_LAYERS, profile))


def places(records: dict[str, Record | None]) -> list[Place]:
    return [Place("demo", row, "Net", None, "done", entry) for row, entry in records.items()]


@pytest.fixture
def interpolation() -> Experiment:
    return Experiment(
        name="demo", title="A figure", figure="sensitivity_interpolation", columns={"Net": []}, rows={"CoRS": []}
    )


@pytest.fixture
def prediction() -> Experiment:
    rows = {"measured": [], "Kronecker": [], "exact": []}
    return Experiment(name="demo", title="A figure", figure="fisher_prediction", columns={"Net": []}, rows=rows)


def assert_drawn(folder):
    """A PDF, and a PNG that is not blank."""
    assert (folder / "demo.pdf").read_bytes().startswith(b"%PDF")
    pixels = np.asarray(Image.open(folder / "demo.png").convert("L"))
    assert pixels.shape[1] > 1000 and 0.001 < (pixels < 128).mean() < 0.5


def test_measured_points_lie_on_the_windows_and_the_spline_has_its_own_curve(interpolation, tmp_path):
    draw_figure(interpolation, places({"CoRS": record()}), tmp_path)
    assert_drawn(tmp_path)
    values = pd.read_csv(tmp_path / "demo.csv")
    assert set(values.layer) == set(INTERPOLATED_LAYERS)
    for _, layer in values.groupby("layer"):
        curves = {name: curve.set_index("ratio").error for name, curve in layer.groupby("curve")}
        assert len(curves["measured"]) == 9 and len(curves["global cubic"]) == 161
        windows = curves["windows (CoRS)"]
        assert np.allclose(windows.index * 200 % 8, 0) and len(windows) == 20  # 24, 32, ..., 176
        assert windows[0.2] == pytest.approx(0.1)
        between = np.interp(windows.index, RATIOS, 10 ** (-5 * RATIOS))
        assert (windows <= between + 1e-12).all()  # a convex curve lies below its chords


def test_layers_that_were_not_measured_are_said_so(interpolation, tmp_path):
    empty = replace(record(), profile={})
    for entry in (None, empty):
        draw_figure(interpolation, places({"CoRS": entry}), tmp_path)
        assert_drawn(tmp_path)
        assert pd.read_csv(tmp_path / "demo.csv").empty


def test_predictions_are_paired_with_what_was_measured(prediction, tmp_path):
    records = {"measured": record(), "Kronecker": record(0.5), "exact": None}
    draw_figure(prediction, places(records), tmp_path)
    assert_drawn(tmp_path)
    values = pd.read_csv(tmp_path / "demo.csv")
    assert set(values.prediction) == {"Kronecker"} and len(values) == 2 * 9
    assert np.allclose(values.predicted, 0.5 * values.measured)
