"""Accuracy against a choice of a method, or against cost."""

from itertools import cycle
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.config import Experiment
from experiments.outcomes import standard_error, unpacked
from experiments.output.plots.colors import BLACK, CURVES, MARKERS
from experiments.output.plots.style import WIDTH, Records, metrics_of, panels, say, share_legend
from experiments.output.tables import flops_unit

CHARACTERS_OF_LABEL = 10  # per line
CHARACTERS_OF_AXIS = 50  # labels that need more than this at equal width are rotated
TURNED: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
LEAST_SPAN = 5  # percentage points on an axis, so that noise looks like noise
BESIDE = 0.1  # distance between curves at one value, so that error bars do not hide each other
PIVOTED = ", pivoted"
COSTS = {"gflops": "{} of the network", "time": "time of a batch, original = 1"}


def ablation(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot the ranked metric of every row, one curve per column; shares of test images have standard errors."""
    metric = experiment.ranked_by
    figure, (axes,) = panels(1, 3.0, width=WIDTH / 2)
    axes.set(xlabel=experiment.axis_title, ylabel=f"{experiment.metrics[metric]} [%] ± standard error")
    values = metrics_of(records, metric).dropna()
    if values.empty:
        say(axes)
    known = {place: record.outcomes for place, record in records.items() if record and metric in record.outcomes}
    errors = {place: standard_error(unpacked(outcomes[metric])) for place, outcomes in known.items()}
    values["standard_error"] = [errors.get(place, np.nan) for place in zip(values.row, values.column, strict=True)]
    for number, (column, color, marker) in enumerate(zip(experiment.columns, cycle(CURVES), cycle(MARKERS))):
        own = values[values.column == column].set_index("row").reindex(experiment.rows)
        x = np.arange(len(own)) + BESIDE * number
        axes.errorbar(x, own[metric], own.standard_error, marker=marker, color=color, capsize=2, label=column)
    if errors:
        low, high = axes.get_ylim()
        room = max(0, LEAST_SPAN - (high - low)) / 2
        axes.set_ylim(low - room, high + room)
    labels = [fill(row, CHARACTERS_OF_LABEL, break_long_words=False) for row in experiment.rows]
    widest = max(len(line) for label in labels for line in label.splitlines())
    axes.set_xticks(range(len(labels)), labels, **(TURNED if widest * len(labels) > CHARACTERS_OF_AXIS else {}))
    axes.margins(x=0.08)
    share_legend(figure, len(experiment.columns))
    return figure, values


def steps(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot top-1 against FLOPs by network, one curve per method; unranked methods are a horizontal line."""
    points = metrics_of(records, "gflops", "top1").dropna()
    points.insert(0, "network", [column.partition(",")[0] for column in points.pop("column")])
    points = points.rename(columns={"row": "method"})
    networks = dict.fromkeys(column.partition(",")[0] for column in experiment.columns)
    unit, per_gflop = flops_unit(points.gflops)
    ranked = (row for row in experiment.rows if row not in experiment.unranked)
    curves = {row: style for row, *style in zip(ranked, cycle(CURVES), cycle(MARKERS))}
    figure, every = panels(len(networks), 3.4)
    for axes, network in zip(every, networks, strict=True):
        axes.set(title=network, xlabel=unit)
        own = points[points.network == network]
        if own.empty:
            say(axes)
        for method, curve in own.groupby("method", sort=False):
            if method in curves:
                curve, (color, marker) = curve.sort_values("gflops"), curves[method]
                axes.plot(per_gflop * curve.gflops, curve.top1, marker=marker, color=color, label=method)
            else:
                axes.axhline(curve.top1.max(), color=BLACK, linestyle="--", label=method)
    every[0].set_ylabel("top-1 [%]")
    share_legend(figure, 2)
    return figure, points


def forms(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot top-1 against FLOPs, and against time where measured, with one curve per method and form."""
    lines = [
        (row.removesuffix(PIVOTED), *(record.config[key] for key in ("form", "ratio")), *_costs(record.metrics))
        for (row, _), record in records.items()
        if record
    ]
    points = pd.DataFrame(lines, columns=["method", "form", "ratio", *COSTS, "top1"])
    unit, per_gflop = flops_unit(points.gflops.dropna())
    shown = points.assign(gflops=per_gflop * points.gflops)
    colors = dict(zip(points.method.unique(), cycle(CURVES), strict=False))
    figure, every = panels(len(COSTS), 3.2, sharey=True)
    for axes, (cost, label) in zip(every, COSTS.items(), strict=True):
        axes.set(xlabel=label.format(unit))
        measured = shown.dropna(subset=[cost, "top1"])
        if measured.empty:
            say(axes)
        for method, curves in measured.groupby("method", sort=False):
            for form, line in (("plain", "o--"), ("pivoted", "s-")):
                curve = curves[curves.form == form].sort_values("ratio")
                axes.plot(curve[cost], curve.top1, line, color=colors[method], label=f"{method}, {form}")
    every[0].set_ylabel("top-1 [%]")
    share_legend(figure, 3)
    return figure, points


def _costs(metrics: dict[str, float]) -> list[float | None]:
    speedup = metrics.get("speedup")
    return [metrics.get("gflops"), speedup and 1 / speedup, metrics.get("top1")]
