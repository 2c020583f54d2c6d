"""Figures of time and speed: accuracy against the time of compression, and against speed; speed by device."""

from itertools import cycle, product
from math import nan
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.config import Experiment
from experiments.output.figures import (
    BLACK,
    BLUE,
    COLUMN_COLORS,
    GREY,
    MARKERS,
    THIN,
    VERMILION,
    Records,
    joined,
    metrics_of,
    one_legend,
    panels,
    span,
    with_differences,
)
from experiments.paper import paper_values
from experiments.record import ERRORS_APART, paired_difference

INCHES_A_ROW = 0.17

SPEED_COLUMNS = ["row", "column", "metric", "speedup", "error"]


def ranking_values(experiment: Experiment, records: Records) -> pd.DataFrame:
    """Order the methods that every column has by mean accuracy, with their mean minutes and distances from the best."""
    num_columns, names = len(experiment.columns), {"total_minutes": "minutes", experiment.ranked_by: "accuracy"}
    points = metrics_of(records, *names).rename(columns=names).dropna(subset="accuracy")
    points["minutes"] = points.minutes if "total_minutes" in experiment.metrics else nan
    points = points[~points.row.isin(experiment.unranked)].groupby("row").filter(lambda own: len(own) == num_columns)
    if points.empty:
        return points
    best = points.groupby("row").accuracy.mean().idxmax()
    points = with_differences(points, records, best, experiment.ranked_by)
    table = points.groupby("row")[["accuracy", "minutes", "difference"]].mean().rename_axis("method")
    table["difference_error"] = points.groupby("row").difference_error.apply(np.linalg.norm) / num_columns
    table["level"] = table.difference >= -ERRORS_APART * table.difference_error
    table = table.sort_values(["accuracy", "minutes"], ascending=[False, True]).reset_index()
    minutes = table.minutes.fillna(np.inf)
    return table.assign(on_front=minutes < minutes.cummin().shift(fill_value=np.inf))


def draw_ranking(experiment: Experiment, methods: pd.DataFrame) -> tuple[Figure, str]:
    """Plot how far the methods' mean accuracy is from the best, and against their mean minutes, if these are known.

    Blue marks those within two standard errors of the best; the line joins methods that no other beats in both.
    """
    is_timed = bool(methods.minutes.notna().any())
    figure, (left, *others) = panels(1 + is_timed, max(2.6, 0.9 + INCHES_A_ROW * len(methods)))
    title, mean = experiment.metrics[experiment.ranked_by], f"mean of {len(experiment.columns)} columns"
    left.set(xlabel=f"{title}: points from the best, ± standard error")
    left.set_title("blue: level with the best", fontsize=7)
    for is_level, color in ((True, BLUE), (False, GREY)):
        own = methods[methods.level == is_level]
        left.errorbar(own.difference, own.index, xerr=own.difference_error, fmt="o", color=color, elinewidth=0.8)
    left.set_yticks(range(len(methods)), methods.method, fontsize=6)
    left.invert_yaxis()
    left.margins(y=0.02)
    for right in others:
        right.set(xlabel=f"seconds of compression, {mean}", ylabel=f"{title} [%], {mean}", xscale="log")
        _draw_front(right, methods)
    level, best = methods[methods.level].sort_values("minutes").method, methods.method[0]
    text = f"By the mean, {len(level)} of {len(methods)} methods are level with the best, {best}"
    quickest = "it" if level.iloc[0] == best else level.iloc[0]
    return figure, text + f"; of these, {quickest} is the quickest" * (len(level) > 1 and is_timed)


def _draw_front(axes: Axes, methods: pd.DataFrame) -> None:
    """Plot mean accuracy against seconds, and name the methods that no other beats in both."""
    axes.set_title("line: the best for the time", fontsize=7)
    axes.margins(x=0.15)
    for is_level, color in ((True, BLUE), (False, GREY)):
        own = methods[methods.level == is_level]
        axes.plot(60 * own.minutes, own.accuracy, "o", color=color)
    front = methods[methods.on_front].sort_values("minutes")
    axes.plot(60 * front.minutes, front.accuracy, color=VERMILION, linewidth=0.8, zorder=0)
    middle = np.sqrt(methods.minutes.min() * methods.minutes.max())
    for method, va in zip(front.itertuples(), cycle(("top", "bottom")), strict=False):  # neighbours may be close
        ha = "left" if method.minutes < middle else "right"  # where there is room
        axes.annotate(f" {method.method} ", (60 * method.minutes, method.accuracy), fontsize=6, ha=ha, va=va)


def throughput_values(experiment: Experiment, records: Records) -> pd.DataFrame:
    """List speeds over the original's by device and network, with errors if known; the paper's without a record."""
    published, found = paper_values(experiment.name), []
    for ((row, column), record), metric in product(records.items(), experiment.shown):
        values = record.values if record else {metric: published.get((row, column, metric))}
        found.append((row, column, metric, values.get(metric), values.get(f"{metric}_error")))
    return pd.DataFrame(found, columns=SPEED_COLUMNS, dtype=object).dropna(subset="speedup").infer_objects()


def draw_throughput(experiment: Experiment, values: pd.DataFrame) -> tuple[Figure, str]:
    """Plot speeds over the original's by device, a panel per network on one scale; the paper's are hollow."""
    rows = [*dict.fromkeys([*experiment.rows, *values.row])]
    here = "here, on networks too small to time well" if experiment.column_titles else "here"
    sides = {True: here, False: "in the paper"}
    figure, every = panels(len(experiment.columns), 1.4 + 0.3 * len(rows), sharex=True, sharey=True)
    for axes, column in zip(every, experiment.columns, strict=True):
        axes.set(title=column, xlabel="times the original's speed")
        axes.axvline(1, color=BLACK, linewidth=0.5)
        for point in values[values.column == column].itertuples():
            number, is_ours = [*experiment.shown].index(point.metric), point.row in experiment.rows
            place = rows.index(point.row) + 0.25 * (number - (len(experiment.shown) - 1) / 2)
            style: dict[str, Any] = {"color": COLUMN_COLORS[number], "label": experiment.metrics[point.metric]}
            style["markerfacecolor"] = COLUMN_COLORS[number] if is_ours else "white"
            axes.errorbar(point.speedup, place, xerr=point.error, fmt="o", markersize=5, **style)
            right = point.speedup + (0 if pd.isna(point.error) else point.error)
            axes.annotate(f"  {point.speedup:.2f}", (right, place), fontsize=6, va="center")
    paper = "paper, full size" if experiment.column_titles else "paper"
    every[0].set_yticks(range(len(rows)), [row if row in experiment.rows else f"{row} ({paper})" for row in rows])
    every[0].margins(x=0.15)
    every[0].set_ylim(len(rows) - 0.5, -0.5)
    if len(experiment.shown) > 1:
        one_legend(every[0], loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    own = values[values.metric == experiment.ranked_by]
    groups = dict(iter(own.groupby(own.row.isin(experiment.rows), sort=False).speedup))
    spans = (f"{span(speeds, '.2f')} {sides[is_ours]}" for is_ours, speeds in groups.items())
    return figure, f"Low-rank layers, times the original's speed: {', '.join(spans)}"


def trade_off_values(experiment: Experiment, records: Records) -> pd.DataFrame:
    """List speeds over the original's, and how far accuracy is ahead of the network's first column in the first row."""
    metric, first = experiment.ranked_by, next(iter(experiment.rows))
    points, parts = metrics_of(records, "speedup", metric).dropna(subset=["speedup", metric]), list[pd.DataFrame]()
    for network, own in points.groupby(points.column.str.replace(", .*", "", regex=True), sort=False):
        original, kinds = own.column.iloc[0], own.column.str.removeprefix(f"{network}, ")
        pairs = [(records[place], records.get((first, original))) for place in zip(own.row, own.column, strict=True)]
        found = [paired_difference(one, other, metric) if one and other else (nan, nan) for one, other in pairs]
        differences = pd.DataFrame(found, own.index, ["difference", "difference_error"], dtype=float)
        parts.append(own.assign(network=network, kind=kinds).join(differences))
    return joined(parts, ["network", "kind", "row", "speedup", metric, "difference", "difference_error"])


def draw_trade_off(experiment: Experiment, values: pd.DataFrame) -> tuple[Figure, str]:
    """Plot accuracy against speed, a panel per network: rows have colours, and what a network became has a mark."""
    figure, every = panels(values.network.nunique(), 2.9, sharex=True, sharey=True)
    colors = dict(zip(experiment.rows, COLUMN_COLORS, strict=False))
    marks = dict(zip(values.kind.unique(), MARKERS, strict=False))
    told = []
    for axes, (network, own) in zip(every, values.groupby("network", sort=False), strict=True):
        axes.set(title=network, xlabel="times the original's speed")
        axes.axhline(0, color=BLACK, linewidth=0.5)
        for point in own.itertuples():
            style: dict[str, Any] = {"color": colors[point.row], "marker": marks[point.kind], "markersize": 5}
            axes.errorbar(point.speedup, point.difference, point.difference_error, **style, **THIN)
        level = own[own.difference >= -ERRORS_APART * own.difference_error.fillna(0)]
        best = level.loc[level.speedup.idxmax()]
        told.append(f"{network} {best.speedup:.1f} times ({best.kind}, {best.row})")
    every[0].set_ylabel(f"{experiment.metrics[experiment.ranked_by]}: points from the original, ± standard error")
    handles = [Line2D([], [], color=color, label=row) for row, color in colors.items()]
    handles += [Line2D([], [], color=GREY, marker=mark, linestyle="none", label=kind) for kind, mark in marks.items()]
    figure.legend(handles=handles, loc="outside right center", fontsize=6)
    return figure, f"Fastest that is level with the original in accuracy: {', '.join(told)}"
