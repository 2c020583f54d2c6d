"""Charts as inline SVG in the colours of the page, so that they follow its light and dark scheme."""

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.output.report.experiment_result import ExperimentResult
from experiments.output.tables import is_dense

INK = "#010203"  # stands for the colour of the text around the chart
SERIES = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#8a6d3b",
    "#7f7f7f",
)  # Okabe and Ito's colours, and two more
CSS = {INK: "currentColor"} | {color: f"var(--series-{number})" for number, color in enumerate(SERIES, start=1)}
MARKERS = "osD^vP*X"
LINES = {"ours": "-", "paper": "--"}
NUM_NAMED = 3  # layers of a sensitivity profile that stand out
WIDTH = 4.5  # inches, with text of 10 points: legible when scaled to a phone
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "svg.fonttype": "none",
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
}
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """A chart and its description in words."""

    title: str
    caption: str
    svg: str


def svg_of(name: str, draw: Callable[[Figure], None], height: float) -> str:
    """Render the SVG element, reproducibly; `name` keeps its inner names distinct from those of other charts."""
    file = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure)
        unnamed = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=unnamed)
    svg = file.getvalue()
    svg = re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg") :])  # names such as figure_1, alike in all charts
    for color, css in CSS.items():
        svg = svg.replace(color, css)
    return svg


def pareto_charts(results: list[ExperimentResult]) -> list[Chart]:
    """Draw the ranked metric against FLOPs, for each network of the tables that differ only in their budget."""
    alike: dict[tuple, list[ExperimentResult]] = {}
    for result in results:
        experiment = result.experiment
        if "gflops" in experiment.metrics:
            alike.setdefault((*experiment.rows, *experiment.columns, experiment.ranked_by), []).append(result)
    return [
        chart
        for group in alike.values()
        if len(group) > 1
        for column in group[0].experiment.columns
        if (chart := _pareto(group, column))
    ]


def _pareto(group: list[ExperimentResult], column: str) -> Chart | None:
    experiment = group[0].experiment
    dense = next((row for row, overrides in experiment.rows.items() if is_dense(overrides)), "")
    panels = {source: _curves(group, column, dense, source) for source in ("ours", "paper")}
    if not panels["ours"]:
        return None
    names = [row for row in experiment.rows if row != dense]
    metric = experiment.metrics[experiment.ranked_by]

    def draw(figure: Figure) -> None:
        lines: dict[str, Line2D] = {}
        for axes, (source, curves) in zip(figure.subplots(1, 2), panels.items(), strict=True):
            axes.set(title=source, xlabel="GFLOPs [%]")
            for name, color, marker in zip(names, cycle(reversed(SERIES)), cycle(MARKERS), strict=False):
                points = curves.get(name, [(np.nan, np.nan)])
                (line,) = axes.plot(*zip(*points, strict=True), LINES[source], marker=marker, color=color)
                lines.setdefault(name, line)
            if dense in curves:
                lines[dense] = axes.axhline(curves[dense][0][1], color=INK, linestyle=":", linewidth=1)
        figure.axes[0].set_ylabel(metric)
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3)

    caption = f"{metric} against the GFLOPs that remain, in percent of the original's; dotted: {dense}"
    return Chart(column, caption, svg_of(f"pareto-{column}", draw, height=3.5))


def _curves(group: list[ExperimentResult], column: str, dense: str, source: str) -> Mapping[str, Points]:
    """Points of `ours` or the `paper` by method, FLOPs in percent of the dense network's."""
    curves: dict[str, Points] = {}
    for result in group:
        values = [
            [getattr(result.entries[row, column, metric], source) for metric in ("gflops", result.experiment.ranked_by)]
            for row in result.experiment.rows
        ]
        by_row = dict(zip(result.experiment.rows, values, strict=True))
        whole = by_row[dense][0] if dense in by_row else None
        for row, (gflops, value) in by_row.items():
            if whole is not None and gflops is not None and value is not None:
                curves.setdefault(row, []).append((100 * gflops / whole, value))
    return {row: sorted(points) for row, points in curves.items()}


def sensitivity_charts(results: list[ExperimentResult]) -> dict[str, list[Chart]]:
    """Draw by network each sensitivity profile that an integer program used, once, with the cells that share it."""
    uses: dict[str, list[tuple[ExperimentResult, str, str]]] = {}
    for result in results:
        for (row, column), record in result.records.items():
            if record.summary and record.profile and record.summary.solution:
                uses.setdefault(repr((record.model_hash, record.profile)), []).append((result, row, column))
    charts: dict[str, list[Chart]] = {}
    for number, places in enumerate(uses.values()):
        result, row, column = places[0]
        record = result.records[row, column]
        caption = "; ".join(f"{result.experiment.name}: {row}" for result, row, _ in places)
        svg = svg_of(f"sensitivity-{number}", partial(_draw_profile, profile=record.profile), height=3.3)
        charts.setdefault(column, []).append(Chart(row, caption, svg))
    return charts


def _draw_profile(figure: Figure, profile: Mapping[str, list[list[float]]]) -> None:
    """Draw one thin line a layer; the three with the largest geometric mean of errors stand out."""
    axes = figure.subplots()
    axes.set(xlabel="rank, in units of the full rank", ylabel="error", yscale="log")
    positive = {layer: np.array([point[1:] for point in points if point[2] > 0]) for layer, points in profile.items()}
    curves = {layer: points.T for layer, points in positive.items() if len(points)}
    worst = sorted(curves, key=lambda layer: np.log(curves[layer][1]).mean(), reverse=True)[:NUM_NAMED]
    for layer in curves:
        if layer not in worst:
            axes.plot(*curves[layer], color=INK, alpha=0.35, linewidth=0.7)
    for layer, color in zip(worst, SERIES, strict=False):
        axes.plot(*curves[layer], color=color, label=layer)
    figure.legend(loc="outside lower left")
