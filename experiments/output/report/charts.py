"""Charts as inline SVG in the colours of the page, so that they follow its light and dark scheme."""

import io
import re
from collections import defaultdict
from itertools import cycle
from math import nan

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from experiments.output.plots.style import STYLE
from experiments.output.report.results import Result
from experiments.output.tables import flops_unit, is_dense

INK = "#010203"  # stands for the colour of the text around the chart
SERIES = ("#0072b2", "#d55e00", "#009e73", "#b0508a", "#b07800", "#2b8cc4", "#8a6d3b", "#7f7f7f")  # clear in both
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
CHARTS = STYLE | dict.fromkeys(INKED, INK) | {"font.size": 10, "axes.titlesize": 10, "grid.alpha": 0.15}
CHARTS |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "svg.fonttype": "none"}
CHARTS |= {"lines.linewidth": 1.3, "lines.markersize": 4, "figure.constrained_layout.use": True}


def svg_of(figure: Figure, name: str) -> str:
    """Render the SVG element reproducibly; `name` keeps its inner names distinct from other charts'."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        unnamed = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=unnamed)
    svg = re.sub(r'<g id="[^"]*"', "<g", file.getvalue())  # names such as figure_1, the same in all charts
    svg = re.sub(r"(\d\.\d)\d{2,}", r"\1", svg)  # tenths of a point, in half the bytes
    return svg[svg.index("<svg") :].replace(INK, "currentColor")


@matplotlib.rc_context(CHARTS)
def pareto_charts(results: list[Result]) -> dict[str, str]:
    """Draw the ranked metric against FLOPs by network, over the tables that differ only in their budget."""
    alike: dict[tuple, list[Result]] = defaultdict(list)
    for result in results:
        experiment = result.experiment
        if "gflops" in experiment.metrics:
            alike[*experiment.rows, *experiment.columns, experiment.ranked_by].append(result)
    groups = [group for group in alike.values() if len(group) > 1]
    charts = {column: _pareto(group, column) for group in groups for column in group[0].experiment.columns}
    return {column: svg_of(figure, f"pareto-{column}") for column, figure in charts.items()}


def _pareto(group: list[Result], column: str) -> Figure:
    """Draw a curve per method, and a dotted horizontal line for the original."""
    experiment = group[0].experiment
    figure = Figure(figsize=(4.5, 3.7))
    for axes, (source, line) in zip(figure.subplots(1, 2), (("ours", "-"), ("paper", "--")), strict=True):
        known = [result.entries[row, column, "gflops"] for result in group for row in experiment.rows]
        unit, per_gflop = flops_unit(value for entry in known if (value := getattr(entry, source)) is not None)
        axes.set(title=source, xlabel=unit)
        styles = zip(cycle(reversed(SERIES)), cycle("osD^vP*X"), strict=False)
        for row, overrides in experiment.rows.items():
            places = [
                [result.entries[row, column, metric] for metric in ("gflops", experiment.ranked_by)] for result in group
            ]
            values = [[getattr(entry, source) for entry in place] for place in places]
            points = np.array(sorted(pair for pair in values if None not in pair)).reshape(-1, 2) * (per_gflop, 1)
            if is_dense(overrides):
                axes.axhline(points[0, 1] if len(points) else nan, color=INK, linestyle=":", linewidth=1, label=row)
            else:
                color, marker = next(styles)
                axes.plot(*points.T, line, marker=marker, color=color, label=row)
    figure.axes[0].set_ylabel(experiment.metrics[experiment.ranked_by])
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
