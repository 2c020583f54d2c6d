"""Accuracy against FLOPs, a panel for each network and a curve for each method."""

import itertools

import pandas as pd
from matplotlib.figure import Figure

from experiments.config import Experiment
from experiments.output.plots.style import BLACK, CURVES, WIDTH, Records, say

COLUMNS = ["network", "method", "gflops", "top1"]


def steps(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot top-1 against GFLOPs; methods that are not ranked, such as the original, are a line across the panel."""
    networks = dict.fromkeys(column.partition(",")[0] for column in experiment.columns)
    points = pd.DataFrame(
        [
            (column.partition(",")[0], row, record.metrics.get("gflops"), record.metrics.get("top1"))
            for (row, column), record in records.items()
            if record
        ],
        columns=COLUMNS,
    ).dropna()
    colors = dict(zip((row for row in experiment.rows if row not in experiment.unranked), itertools.cycle(CURVES)))
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    for axes, network in zip(figure.subplots(1, len(networks), squeeze=False)[0], networks, strict=True):
        axes.set(title=network, xlabel="GFLOPs")
        own = points[points.network == network]
        if own.empty:
            say(axes)
        for method, curve in own.groupby("method", sort=False):
            if method in colors:
                curve = curve.sort_values("gflops")
                axes.plot(curve.gflops, curve.top1, "o-", color=colors[method], markersize=3, label=method)
            else:
                axes.axhline(curve.top1.max(), color=BLACK, linewidth=0.9, linestyle="--", label=method)
    figure.axes[0].set_ylabel("top-1 [%]")
    shown = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=2)
    return figure, points
