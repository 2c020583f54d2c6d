"""Figures: what is plotted is what the records say, and what is missing is said."""

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from experiments.config import Experiment
from experiments.output.figures import ranking, set_height
from experiments.output.layer_figures import INTERPOLATED_LAYERS
from experiments.output.results import DRAWINGS, draw_figure
from experiments.record import Record, packed
from tests.records import demo, make_record, make_summary, place

RATIOS = np.arange(1, 10) / 10


def drawing(figure: str, *rows: str, columns: str = "Net", **fields) -> Experiment:
    named = {"columns": {column: [] for column in columns.split(", ")}, "rows": {row: [] for row in rows}}
    title = "A figure of many words, so many that they take more than a line"
    return demo(title=title, figure=figure, **named, **fields)


def drawn(experiment: Experiment, records: dict[str, Record | None]) -> tuple[Figure, pd.DataFrame]:
    """The figure of records of `Net` by row, and the plotted values."""
    return DRAWINGS[experiment.figure](experiment, {(row, "Net"): record for row, record in records.items()})


def test_measured_points_lie_on_the_windows_and_the_spline_has_its_own_curve():
    """Layers have full rank 200, and their errors are powers of ten."""
    profile = [[round(200 * ratio), ratio, 10 ** (-5 * ratio)] for ratio in RATIOS]
    record = make_record(summary=make_summary(profile=dict.fromkeys(INTERPOLATED_LAYERS, profile)))
    _, values = drawn(drawing("sensitivity_interpolation", "CoRS"), {"CoRS": record})
    assert set(values.layer) == set(INTERPOLATED_LAYERS)
    for _, layer in values.groupby("layer"):
        curves = {name: curve.set_index("ratio").error for name, curve in layer.groupby("curve")}
        assert len(curves["measured"]) == 9 and len(curves["global cubic"]) == 161
        windows = curves["windows (CoRS)"]
        assert np.allclose(windows.index * 200 % 8, 0) and len(windows) == 20  # 24, 32, ..., 176
        assert windows[0.2] == pytest.approx(0.1)
        between = np.interp(windows.index, RATIOS, 10 ** (-5 * RATIOS))
        assert (windows <= between + 1e-12).all()  # a convex curve lies below its chords


@pytest.mark.parametrize("name", sorted(DRAWINGS.keys() - {"token_couplings"}))
def test_a_figure_of_nothing_says_so(name):
    assert drawn(drawing(name, "A"), {"A": None})[1].empty


COUPLING = {
    "layer": "blocks.4.mlp.fc2",
    "num_samples": 30,
    "coupling": [[2.0, 0.5, 0.0], [0.5, 1.0, 0.1], [0.0, 0.1, 0.0]],
    "distance_correlation": [0.3, 0.1, None],
    "p_value": [0.001, 0.2, None],
}


def test_couplings_show_the_map_and_the_tokens_that_vary(tmp_path):
    """And a figure is written as PDF and as PNG, which is not blank, with its values."""
    experiment = drawing("token_couplings", "coupling", columns="Net, Other")
    draw_figure(experiment, [place("coupling", make_record(analysis=COUPLING))], tmp_path)
    assert (tmp_path / "demo.pdf").read_bytes().startswith(b"%PDF")
    pixels = np.asarray(Image.open(tmp_path / "demo.png").convert("L"))
    assert pixels.shape[1] > 600 and 0.001 < (pixels < 128).mean() < 0.5
    values = pd.read_csv(tmp_path / "demo.csv")
    assert set(values.column) == {"Net"}
    pairs = values.dropna(subset="coupling").pivot(index="token", columns="other", values="coupling")
    assert np.triu(pairs).tolist() == np.triu(COUPLING["coupling"]).tolist()
    tokens = values[values.coupling.isna()].set_index("token")
    assert tokens.distance_correlation[0] == 0.3 and tokens.p_value[1] == 0.2
    assert np.isnan(tokens.distance_correlation[2])


def test_an_ablation_shows_measured_values_in_the_order_of_its_rows():
    records = {"0.7": judged(1800, 0, 2000), "0.1": None, "none": judged(1790, 0, 2000)}
    figure, values = drawn(drawing("ablation", *records), records)
    assert values[["row", "top1"]].to_numpy().tolist() == [["0.7", 90.0], ["none", 89.5]]
    assert values.standard_error.tolist() == pytest.approx([0.671, 0.686], abs=0.001)
    assert np.ptp(figure.axes[0].get_ylim()) >= 5 and figure.axes[0].get_legend() is None and figure.legends


@pytest.mark.parametrize(
    ("rows", "expected", "scale", "line"),
    [
        (["0.1", "0.3", "0.9", "1.0"], [0.1, 0.3, 0.9, 1.0], "linear", "-"),
        (["100", "1", "10000"], [100, 1, 10000], "log", "-"),
        (["0", "0.001", "1"], [0, 1, 2], "linear", "-"),  # no room for labels, and no logarithm of zero
        (["none", "0.1", "1"], [0, 1, 2], "linear", "None"),
    ],
)
def test_values_of_an_axis_lie_where_they_belong_and_names_are_not_joined(rows, expected, scale, line):
    records = {row: judged(180 + number, 0) for number, row in enumerate(rows)}
    figure, _ = drawn(drawing("ablation", *rows), records)
    (axes,) = figure.axes
    assert axes.get_xticks().tolist() == expected and axes.get_xscale() == scale
    assert axes.lines[0].get_linestyle() == line
    assert [label.get_text() for label in axes.get_xticklabels()] == rows
    heights = dict(zip(expected, (records[row].metrics["top1"] for row in rows), strict=True))
    assert axes.lines[0].get_xydata().tolist() == [[place, heights[place]] for place in sorted(expected)]
    assert axes.get_ylim()[0] < min(heights.values()) < max(heights.values()) < axes.get_ylim()[1]


def judged(num_right: int, minutes: float, size: int = 200, **metrics: float) -> Record:
    """The first so many of the test images are right."""
    right = torch.arange(size) < num_right
    metrics |= {"top1": 100 * num_right / size}
    return make_record(metrics=metrics, outcomes={"top1": packed(right)}, seconds={"search": 60 * minutes})


@pytest.fixture
def ranked() -> tuple[Experiment, dict]:
    """A slow best, a quick one just behind it, one that is neither, and one that has no record of the second column."""
    lines = {"Dense": (200, 0), "best": (180, 9), "quick": (179, 1), "poor": (100, 2), "half": (190, 1)}
    records = {(row, column): judged(*line) for row, line in lines.items() for column in "AB"}
    return drawing("ranking", *lines, columns="A, B", unranked=["Dense"]), {**records, ("half", "B"): None}


def test_a_ranking_says_who_is_level_with_the_best_and_who_is_worth_its_time(ranked):
    """One image of 200 that tells two methods apart is missing from a third of the draws; eighty never are."""
    figure, methods = ranking(*ranked)
    assert methods.method.tolist() == ["best", "quick", "poor"] and methods["rank"].tolist() == [1, 2, 3]
    assert methods.level.tolist() == [True, True, False]
    assert methods.rank_low.tolist() == [1, 1.5, 3] and methods.rank_high.tolist() == [1.5, 2, 3]
    assert methods.on_front.tolist() == [True, True, False] and methods.accuracy.tolist() == [90, 89.5, 50]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["best  1", "quick  2", "poor  3"]
    assert [text.get_text() for text in figure.axes[1].texts] == [" 2 ", " 1 "]


def test_steps_have_standard_errors_and_a_colour_for_each_of_many_methods():
    records = {f"method {number}": judged(150 + number, 0, gflops=2.0 + number) for number in range(14)}
    figure, values = drawn(drawing("steps", *records), records)
    assert values.standard_error.iloc[0] == pytest.approx(3.07, abs=0.01)
    axes = figure.axes[0]
    assert len({container.lines[0].get_color() for container in axes.containers}) == len(records)
    assert axes.containers[0].has_yerr and "standard error" in axes.get_ylabel()


@pytest.mark.parametrize(("worst", "bottom"), [(10, 170 - 8 * 5), (160, None)])
def test_an_axis_ends_where_a_method_loses_many_times_what_most_lose(worst, bottom):
    """The original has 170 of 200 images right, and most methods 165."""
    num_right = {"Dense": 170, **{f"method {number}": 165 for number in range(3)}, "worst": worst}
    records = {row: judged(right, 0, gflops=2.0 + place) for place, (row, right) in enumerate(num_right.items())}
    (axes,) = drawn(drawing("steps", *records, unranked=["Dense"]), records)[0].axes
    assert axes.get_ylim()[0] == pytest.approx(bottom / 2) if bottom else axes.get_ylim()[0] < worst / 2
    assert [text.get_text() for text in axes.texts] == ["lower points: in the table"] * bool(bottom)


@pytest.mark.parametrize(
    ("speeds", "scale", "lowest"), [([3000, 3440], "linear", 0), ([30.2, 4000], "log", 10), ([], "linear", 0)]
)
def test_bars_of_speed_stand_on_zero_or_on_a_power_of_ten(speeds, scale, lowest):
    axes = Figure().subplots()
    set_height(axes, pd.Series(speeds, dtype=float))
    assert (axes.get_yscale(), axes.get_ylim()[0]) == (scale, lowest) and axes.get_ylim()[1] > max(speeds, default=0)
