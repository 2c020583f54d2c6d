"""Figures: what is plotted is what the records say, and what is missing is said."""

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from experiments import paper
from experiments.config import Experiment
from experiments.output.figures import BLACK, style_of
from experiments.output.layer_figures import INTERPOLATED_LAYERS
from experiments.output.results import DRAWINGS, draw_figure, drawn, values_of
from experiments.record import Record, packed
from tests.records import demo, make_record, make_summary

RATIOS = np.arange(1, 10) / 10
COUPLING = {"coupling": [[2.0, 0.5, 0.0], [0.5, 1.0, 0.1], [0.0, 0.1, 0.0]], "p_value": [0.001, 0.2, None]}
COUPLING |= {"layer": "blocks.4.mlp.fc2", "num_samples": 30, "distance_correlation": [0.3, 0.1, None]}


def drawing(figure: str, *rows: str, columns: str = "Net", **fields) -> Experiment:
    named = {"columns": {column: [] for column in columns.split(", ")}, "rows": {row: [] for row in rows}}
    title = "A figure of many words, so many that they take more than a line"
    return demo(title=title, figure=figure, **named, **fields)


def drawn_from(experiment: Experiment, records: dict[str, Record | None]) -> tuple[Figure, pd.DataFrame]:
    """The figure of records of `Net` by row, and the plotted values."""
    values = values_of(experiment, {(row, "Net"): record for row, record in records.items()})
    return drawn(experiment, values)[0], values


def test_measured_points_lie_on_the_windows_and_the_spline_has_its_own_curve():
    """Layers have full rank 200, and their errors are powers of ten."""
    profile = [[round(200 * ratio), ratio, 10 ** (-5 * ratio)] for ratio in RATIOS]
    record = make_record(summary=make_summary(profile=dict.fromkeys(INTERPOLATED_LAYERS, profile)))
    _, values = drawn_from(drawing("sensitivity_interpolation", "CoRS"), {"CoRS": record})
    assert set(values.layer) == set(INTERPOLATED_LAYERS)
    for _, layer in values.groupby("layer"):
        curves = {name: curve.set_index("ratio").error for name, curve in layer.groupby("curve")}
        windows = curves["windows (CoRS)"]
        assert [len(curves["measured"]), len(curves["global cubic"]), len(windows)] == [9, 161, 20]
        assert np.allclose(windows.index * 200 % 8, 0) and windows[0.2] == pytest.approx(0.1)  # 24, 32, ..., 176
        between = np.interp(windows.index, RATIOS, 10 ** (-5 * RATIOS))
        assert (windows <= between + 1e-12).all()  # a convex curve lies below its chords


@pytest.mark.parametrize("name", sorted(DRAWINGS.keys() - {"token_couplings"}))
def test_a_figure_of_nothing_says_so(name):
    assert drawn_from(drawing(name, "A"), {"A": None})[1].empty


def test_couplings_show_the_map_and_the_tokens_that_vary(tmp_path):
    """And a figure is written as PDF and as PNG, which is not blank, with its values."""
    experiment = drawing("token_couplings", "coupling", columns="Net, Other")
    draw_figure(experiment, values_of(experiment, {("coupling", "Net"): make_record(analysis=COUPLING)}), tmp_path)
    assert (tmp_path / "demo.pdf").read_bytes().startswith(b"%PDF")
    pixels = np.asarray(Image.open(tmp_path / "demo.png").convert("L"))
    assert pixels.shape[1] > 600 and 0.001 < (pixels < 128).mean() < 0.5
    values = pd.read_csv(tmp_path / "demo.csv")
    assert set(values.column) == {"Net"}
    pairs = values.dropna(subset="coupling").pivot(index="token", columns="other", values="coupling")
    assert np.triu(pairs).tolist() == np.triu(COUPLING["coupling"]).tolist()
    tokens = values[values.coupling.isna()].set_index("token")
    assert (tokens.distance_correlation[0], tokens.p_value[1]) == (0.3, 0.2) and np.isnan(
        tokens.distance_correlation[2]
    )


def test_an_ablation_shows_measured_values_in_the_order_of_its_rows():
    records = {"0.7": judged(1800, size=2000), "0.1": None, "none": judged(1790, size=2000)}
    experiment = drawing("ablation", *records, axis_title="bound")
    figure, values = drawn_from(experiment, records)
    assert drawn(experiment, values)[1] == "Bound: no value gains over 0.7; none costs 0.5 ± 0.2 points (Net)"
    more = values.assign(row=["0.7", "0.1"], difference=[0, 0.5])
    assert drawn(experiment, more)[1] == "Bound: 0.1 gains 0.5 ± 0.2 points over 0.7 (Net)"
    assert values[["row", "top1"]].to_numpy().tolist() == [["0.7", 90.0], ["none", 89.5]]
    experiment.default = "none"
    from_default = values_of(experiment, {(row, "Net"): record for row, record in records.items()})
    assert from_default.difference.tolist() == pytest.approx([0.5, 0])
    shown, message = drawn(experiment, from_default)
    assert message == "Bound: 0.7 gains 0.5 ± 0.2 points over the default, none (Net)"
    assert shown.axes[0].get_ylabel() == "Top-1: points from the default"
    assert values.standard_error.tolist() == pytest.approx([0.671, 0.686], abs=0.001)
    assert values.difference.tolist() == pytest.approx([0, -0.5])
    assert values.difference_error.tolist() == pytest.approx([0, 0.158], abs=0.001)  # ten images of 2,000, not 0.7
    assert np.ptp(figure.axes[0].get_ylim()) >= 2 and [text.get_text() for text in figure.axes[0].texts] == ["Net"]


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
    records = {row: judged(180 + number) for number, row in enumerate(rows)}
    figure, _ = drawn_from(drawing("ablation", *rows), records)
    (axes,) = figure.axes
    assert axes.get_xticks().tolist() == expected and axes.get_xscale() == scale
    assert axes.lines[1].get_linestyle() == line
    assert [label.get_text() for label in axes.get_xticklabels()] == rows
    heights = dict(zip(expected, (0.5 * number for number in range(len(rows))), strict=True))
    assert axes.lines[1].get_xydata().tolist() == [[place, heights[place]] for place in sorted(expected)]
    assert axes.get_ylim()[0] < min(heights.values()) < max(heights.values()) < axes.get_ylim()[1]


def judged(num_right: int, minutes: float = 0, size: int = 200, **metrics: float) -> Record:
    """The first so many of the test images are right."""
    outcomes = {"top1": packed(torch.arange(size) < num_right)}
    metrics |= {"top1": 100 * num_right / size}
    return make_record(metrics=metrics, outcomes=outcomes, seconds={"search": 60 * minutes})


def test_a_ranking_says_who_is_level_with_the_best_and_who_is_worth_its_time():
    """One image of 200 is less than two standard errors; eighty are more. `half` has no record of the second column."""
    lines = {"Dense": (200, 0), "best": (180, 9), "quick": (179, 1), "poor": (100, 2), "half": (190, 1)}
    records = {(row, column): judged(*line) for row, line in lines.items() for column in "AB"} | {("half", "B"): None}
    metrics = {"top1": "Top-1", "total_minutes": "Total [min]"}
    experiment = drawing("ranking", *lines, columns="A, B", unranked=["Dense"], metrics=metrics)
    methods = values_of(experiment, records)
    figure, message = drawn(experiment, methods)
    assert methods.method.tolist() == ["best", "quick", "poor"] and methods.difference.tolist() == [0, -0.5, -40]
    assert methods.level.tolist() == [True, True, False]
    assert methods.difference_error.tolist() == pytest.approx([0, 0.5 / 2**0.5, 3.47 / 2**0.5], abs=0.01)
    assert methods.on_front.tolist() == [True, True, False] and methods.accuracy.tolist() == [90, 89.5, 50]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["best", "quick", "poor"]
    assert [text.get_text() for text in figure.axes[1].texts] == [" quick ", " best "]
    assert message == "By the mean, 2 of 3 methods are level with the best, best; of these, quick is the quickest"
    del experiment.metrics["total_minutes"]
    figure, message = drawn(experiment, values_of(experiment, records))
    assert len(figure.axes) == 1 and message == "By the mean, 2 of 3 methods are level with the best, best"


def test_steps_are_differences_of_the_best_methods_on_the_same_images():
    """Of 14 methods, each right on one image more, the best five are shown beside the original."""
    records = {f"method {number}": judged(150 + number, gflops=3.0 + number) for number in range(14)}
    records = {"Dense": judged(170, gflops=2.0), **records}
    figure, values = drawn_from(drawing("steps", *records, unranked=["Dense"]), records)
    assert values.standard_error.iloc[1] == pytest.approx(3.07, abs=0.01)
    assert values.difference.tolist() == pytest.approx([0, *(number / 2 - 10 for number in range(14))])
    assert values.difference_error.iloc[2] == pytest.approx(2.1, abs=0.05)
    (axes,) = figure.axes
    names = {"Dense", *(f"method {number}" for number in range(9, 14)), "the 5 best of 14 methods: see the table"}
    assert {text.get_text() for text in axes.texts} == names and "from dense" in axes.get_ylabel()
    places = sorted(text.get_position()[1] for text in axes.texts if "see" not in text.get_text())
    assert min(np.diff(places)) > 0.05 and places[0] > 0 and axes.containers[0].has_yerr


@pytest.mark.parametrize(
    ("right", "message"),
    [
        (
            (170, 167, 100),
            "With units (FACTS), at most 1.5 ± 0.9 points (Net) below dense down to 50 % of the FLOPs; at 30 %, up to "
            "35.0 ± 3.4 points (Net)",
        ),
        (
            (100, 168, 90),
            "At 30 % of the FLOPs, points below dense: 40.0 ± 3.5 with units (FACTS); 45.0 ± 3.5 with layers (FACTS)",
        ),
    ],
)
def test_a_figure_of_steps_says_how_far_its_best_method_is_level(right, message):
    experiment, records = drawing("steps", "Dense", "Layers: FACTS", "Units: FACTS", unranked=["Dense"]), {}
    experiment.columns = {f"{network}, {share} %": [] for network in ("Net", "Other") for share in (80, 50, 30)}
    for column, number in zip(experiment.columns, [*right, *right], strict=True):
        records["Dense", column] = judged(170, gflops=2.0)
        records["Units: FACTS", column] = judged(number, gflops=1.0)
        records["Layers: FACTS", column] = judged(number - 10, gflops=1.0)
    assert drawn(experiment, values_of(experiment, records))[1] == message


def test_a_figure_of_steps_is_about_the_first_row_drawn_under_the_names_of_the_profile():
    chosen = {"unranked": ["Dense"], "drawn": ["Layers: FACTS", "Units: FACTS", "not measured"]}
    experiment = drawing("steps", "Dense", "Layers: FACTS", "Units: FACTS", "Units: PELA", **chosen)
    right = {"Dense": 170, "Units: FACTS": 168, "Layers: FACTS": 100, "Units: PELA": 169}
    records = {(row, "Net"): judged(number, gflops=1.0) for row, number in right.items()}
    experiment.column_titles = {"Net": "small Net"}
    figure, message = drawn(experiment, values_of(experiment, records))
    assert message == "Points below dense: 35.0 ± 3.4 with layers (FACTS); 1.0 ± 0.7 with units (FACTS)"
    (axes,) = figure.axes
    names = {"Dense", "Layers: FACTS", "Units: FACTS", "2 of 3 methods: see the table"}
    assert axes.get_title() == "small Net" and {text.get_text() for text in axes.texts} == names


def test_speed_and_accuracy_of_each_network_stand_beside_each_other():
    speeds = {
        ("float32", "Net, dense"): (170, 1.0),
        ("int8", "Net, dense"): (169, 2.0),
        ("int8", "Net, half"): (150, 3.0),
    }
    records = {place: judged(right, speedup=speed) for place, (right, speed) in speeds.items()}
    experiment = drawing("trade_off", "float32", "int8")
    experiment.columns = {"Net, dense": [], "Net, half": []}
    figure, message = drawn(experiment, values_of(experiment, records))
    assert message == "Fastest that is level with the original in accuracy: Net 2.0 times (dense, int8)"
    points = [tuple(map(float, container.lines[0].get_xydata()[0])) for container in figure.axes[0].containers]
    assert points == [(1.0, 0), (2.0, -0.5), (3.0, -10)]


def test_a_method_has_the_colour_of_its_parts_in_every_figure():
    rows = {"A": ["parts=units"], "B": ["search=cors", "parts=units"], "C": ["parts='units,tokens'"], "D": []}
    styles = [style_of(row, demo(rows=rows, unranked=["D"])) for row in rows]
    assert styles[0]["color"] == styles[1]["color"] != styles[2]["color"] and styles[3]["color"] == BLACK
    assert styles[0]["marker"] != styles[1]["marker"]


@pytest.mark.parametrize(("worst", "bottom"), [(10, -5), (160, None)])
def test_an_axis_ends_where_a_method_loses_many_times_what_most_lose(worst, bottom):
    """The first method has 165 of 200 images right, and others 164."""
    others = {f"method {number}": judged(164, gflops=3.0 + number) for number in range(3)}
    records = {"method": judged(165, gflops=2.0), **others, "worst": judged(worst, gflops=6.0)}
    (axes,) = drawn_from(drawing("steps", *records), records)[0].axes
    assert axes.get_ylim()[0] == pytest.approx(bottom) if bottom else -5 < axes.get_ylim()[0] < worst / 2 - 82.5
    assert ("lower points are cut off: see the table" in [text.get_text() for text in axes.texts]) == bool(bottom)


def test_speeds_are_those_over_the_original_ours_filled_and_the_papers_hollow(tmp_path, monkeypatch):
    """A network of a few thousand weights is not put beside an H100 by its images per second."""
    monkeypatch.setattr(paper, "FOLDER", tmp_path)
    (tmp_path / "demo.csv").write_text("row,column,metric,paper\nV100,Net,speedup,1.6\n")
    experiment = drawing("throughput", "here", metrics={"speedup": "Low rank"}, ranked_by="speedup", shown=["speedup"])
    record = make_record(metrics={"speedup": 1.2, "speedup_error": 0.1, "dense_throughput": 9000.0})
    figure, values = drawn_from(experiment, {"here": record})
    assert values[["row", "speedup"]].to_numpy().tolist() == [["here", 1.2], ["V100", 1.6]]
    lines = [container.lines[0] for container in figure.axes[0].containers]
    assert [line.get_markerfacecolor() == "white" for line in lines] == [False, True]
    assert drawn(experiment, values)[1].endswith("speed: 1.20 here, 1.60 in the paper")
