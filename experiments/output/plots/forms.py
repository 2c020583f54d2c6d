"""Accuracy against cost, with plain and with pivoted low-rank layers."""

import itertools

import pandas as pd
from matplotlib.figure import Figure

from experiments.config import Experiment
from experiments.output.plots.style import CURVES, WIDTH, Records, say
from experiments.record import Record

PIVOTED = ", pivoted"
AXES = {"gflops": "GFLOPs of the network", "time": "time of a batch, original = 1"}
COLUMNS = ["method", "form", "ratio", *AXES, "top1"]


def forms(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot top-1 against FLOPs, and against measured time where it was measured; a curve a method and form."""
    points = pd.DataFrame([_point(row, record) for (row, _), record in records.items() if record], columns=COLUMNS)
    colors = dict(zip(points.method.unique(), itertools.cycle(CURVES), strict=False))
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    for axes, (axis, label) in zip(figure.subplots(1, len(AXES), sharey=True), AXES.items(), strict=True):
        axes.set(xlabel=label)
        measured = points.dropna(subset=[axis, "top1"])
        if measured.empty:
            say(axes)
        for method, curves in measured.groupby("method", sort=False):
            for form, line in (("plain", "o--"), ("pivoted", "s-")):
                curve = curves[curves.form == form].sort_values("ratio")
                style = {"color": colors[method], "markersize": 3, "linewidth": 0.9, "label": f"{method}, {form}"}
                axes.plot(curve[axis], curve.top1, line, **style)
    figure.axes[0].set_ylabel("top-1 [%]")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure, points


def _point(row: str, record: Record) -> dict[str, object]:
    speedup = record.metrics.get("speedup")
    return {
        "method": row.removesuffix(PIVOTED),
        "form": record.config["form"],
        "ratio": record.config["ratio"],
        "gflops": record.metrics.get("gflops"),
        "time": speedup and 1 / speedup,
        "top1": record.metrics.get("top1"),
    }
