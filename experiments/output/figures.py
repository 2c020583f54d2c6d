"""Figures of accuracy and speed: against a choice of a method, cost or time, ranked, and by device.

Their style, and the parts that figures share, come first.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import cycle
from math import nan
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.config import Experiment
from experiments.output.tables import flops_unit
from experiments.paper import paper_values
from experiments.record import Record, mean_ranks, standard_error, unpacked

# Okabe and Ito's colours, which the colour-blind can distinguish.
BLUE, VERMILION, GREEN, ORANGE, BLACK, GREY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#000000", "#999999"
# Two more of theirs, then Tol's.
FURTHER = ("#CC79A7", "#56B4E9", "#882255", "#999933", "#332288", "#7F4F24", "#44AA99", "#AA4499", "#117733", "#E3B7D0")
CURVES = (BLUE, VERMILION, GREEN, ORANGE, *FURTHER)  # of methods, in order; black is the original's
MARKERS = "osD^vPX"
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.grid": True,
    "grid.alpha": 0.4,
    "grid.linestyle": "--",
    "lines.linewidth": 0.9,
    "lines.markersize": 3,
    "pdf.fonttype": 42,
}
WIDTH = 6.9  # inches: two columns of the paper

Records = dict[tuple[str, str], Record | None]
Drawing = Callable[[Experiment, Records], tuple[Figure, pd.DataFrame]]

CHARACTERS_OF_LABEL = 10  # per line
CHARACTERS_OF_DEVICE = 12  # the same
CHARACTERS_OF_AXIS = 50  # labels that need more than this at equal width are rotated
MOST_LABELS = 12  # beside each other on an axis
TURNED: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
MOST_LOST = 8  # times the median loss, on an axis
LEAST_SPAN = 5  # percentage points on an axis, so that noise looks like noise
THIN: dict[str, Any] = {"elinewidth": 0.4, "capsize": 1.5, "capthick": 0.4}  # error bars of many curves
BESIDE = 0.015  # of the axis between curves at one value, so that error bars do not hide each other

NUM_DRAWS = 1000
INTERVAL = (2.5, 97.5)  # percentiles
INCHES_A_ROW = 0.17
RANKING_COLUMNS = ["method", "rank", "rank_low", "rank_high", "level", "accuracy", "minutes", "on_front"]

BARS = {
    "dense": ("original", BLUE),
    "residual": ("low rank, MemViT's residual", ORANGE),
    "compressed": ("low rank", GREEN),
    "half": ("original, half precision", GREY),
    "two_of_four": ("2:4 sparse, half precision", VERMILION),
}
BASES = {"two_of_four": "half"}  # of ratios, besides `dense`
SPEED_COLUMNS = ["row", "column", "network", "throughput", "spread", "ratio"]
THROUGHPUT = "_throughput"  # the ending of metrics
PUBLISHED = "///"  # hatching of the paper's bars


def panels(columns: int, height: float, rows: int = 1, width: float = WIDTH) -> tuple[Figure, list[Axes]]:
    """Make a figure with panels side by side; sizes are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def placeholder(axes: Axes, what: str = "not measured") -> None:
    """Write words in place of a plot."""
    axes.text(0.5, 0.5, what, ha="center", transform=axes.transAxes)


def joined(parts: list[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    """Join the plotted values into one table; empty if nothing was measured."""
    return pd.concat(parts)[columns] if parts else pd.DataFrame(columns=columns)


def metrics_of(records: Records, *metrics: str) -> pd.DataFrame:
    """Collect metrics by row and column, and the last one's error, one line per record; NaN where it lacks one."""
    found = []
    for place, record in records.items():
        if record:
            shares = record.outcomes.get(metrics[-1])
            error = standard_error(unpacked(shares)) if shares else nan
            found.append((*place, *(record.metrics.get(metric, nan) for metric in metrics), error))
    return pd.DataFrame(found, columns=["row", "column", *metrics, "standard_error"])


def share_legend(figure: Figure, columns: int) -> None:
    """Put one legend of all panels below them."""
    handles = {
        label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)


def ablation(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot the ranked metric of every row by column; lines join numbers. Shares of test images have standard errors."""
    metric = experiment.ranked_by
    figure, (axes,) = panels(1, 3.0, width=WIDTH / 2)
    places, scale, linestyle = places_of([*experiment.rows])
    axes.set(xlabel=experiment.axis_title, ylabel=f"{experiment.metrics[metric]} [%] ± standard error", xscale=scale)
    axes.minorticks_off()
    values = metrics_of(records, metric).dropna(subset=metric)
    if values.empty:
        placeholder(axes)
    for number, (column, color, marker) in enumerate(zip(experiment.columns, cycle(CURVES), cycle(MARKERS))):
        own = values[values.column == column].set_index("row").reindex(experiment.rows)
        own = own.iloc[np.argsort(places)]
        x, beside = np.sort(places), BESIDE * number
        x = x * (x[-1] / x[0]) ** beside if scale == "log" else x + (np.ptp(x) or 1) * beside
        style: dict[str, Any] = {"marker": marker, "color": color, "linestyle": linestyle, "label": column}
        axes.errorbar(x, own[metric], own.standard_error, capsize=2, **style)
    if values.standard_error.any():
        low, high = axes.get_ylim()
        room = max(0, LEAST_SPAN - (high - low)) / 2
        axes.set_ylim(max(0, low - room), high + room)
    labels = [fill(row, CHARACTERS_OF_LABEL, break_long_words=False) for row in experiment.rows]
    widest = max(len(line) for label in labels for line in label.splitlines())
    is_wide = widest * len(labels) > CHARACTERS_OF_AXIS
    axes.set_xticks(places, [*experiment.rows] if is_wide else labels, **(TURNED if is_wide else {}))
    axes.margins(x=0.08)
    share_legend(figure, len(experiment.columns))
    return figure, values


def places_of(rows: list[str]) -> tuple[np.ndarray, str, str]:
    """Find the places of rows on an axis, its scale and the style of lines: names are not joined.

    Numbers are placed at their values if that leaves room for labels.
    """
    places, linestyle = np.arange(len(rows)), "none"
    with suppress(ValueError):
        values, linestyle = np.array([*map(float, rows)]), "-"
        for scale, spread in (("linear", values), ("log", np.log(values.clip(min=1e-300)))):
            if np.isfinite(spread).all() and (np.diff(np.sort(spread)) >= np.ptp(spread) / MOST_LABELS).all():
                return values, scale, linestyle
    return places, "linear", linestyle


def steps(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot top-1 against FLOPs by network, one curve per method; unranked methods are a horizontal line."""
    points = metrics_of(records, "gflops", "top1").dropna(subset=["gflops", "top1"])
    points.insert(0, "network", [column.partition(",")[0] for column in points.pop("column")])
    points = points.rename(columns={"row": "method"})
    networks = dict.fromkeys(column.partition(",")[0] for column in experiment.columns)
    unit, per_gflop = flops_unit(points.gflops)
    ranked = (row for row in experiment.rows if row not in experiment.unranked)
    curves = {row: style for row, *style in zip(ranked, cycle(CURVES), cycle(MARKERS))}
    figure, every = panels(len(networks), 2.4 + INCHES_A_ROW * -(-len(experiment.rows) // 2))
    for axes, network in zip(every, networks, strict=True):
        axes.set(title=network, xlabel=f"{unit} of the whole network")
        own = points[points.network == network]
        if own.empty:
            placeholder(axes)
        for method, curve in own.groupby("method", sort=False):
            if method in curves:
                curve, (color, marker) = curve.sort_values("gflops"), curves[method]
                style = {"marker": marker, "color": color, "label": method}
                axes.errorbar(per_gflop * curve.gflops, curve.top1, curve.standard_error, **style, **THIN)
            else:
                axes.axhline(curve.top1.max(), color=BLACK, linestyle="--", label=method)
        show_where_methods_differ(axes, own[~own.method.isin(curves)].top1.max(), own[own.method.isin(curves)].top1)
    every[0].set_ylabel("Top-1 [%] ± standard error")
    share_legend(figure, 2)
    return figure, points


def show_where_methods_differ(axes: Axes, original: float, values: pd.Series) -> None:
    """Cut an axis where some methods lose many times what most lose: they would press the others into one line."""
    span = max(LEAST_SPAN, MOST_LOST * (original - values).median())
    if values.min() < original - span:
        axes.set_ylim(original - span, max(original, values.max()) + span / 5)
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        style: dict[str, Any] = {"fontsize": 6, "ha": "right", "bbox": ground, "transform": axes.transAxes}
        axes.text(0.99, 0.03, "lower points: in the table", **style)


def ranking(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot the mean ranks of the methods that every column has, and their mean accuracy against their mean minutes.

    95 % intervals of ranks come from a bootstrap over test images, the same for all methods and columns of one size.
    Blue marks the best and those whose rank difference may be zero; the line joins methods that no other beats in both.
    """
    methods = ranked(experiment, records)
    figure, (left, right) = panels(2, max(2.6, 0.9 + INCHES_A_ROW * len(methods)))
    left.set(xlabel="mean rank, 95 % interval")
    mean = f"mean of {len(experiment.columns)} columns"
    right.set(xlabel=f"minutes of compression, {mean}", xscale="log")
    left.set_title("blue: level with the best", fontsize=7)
    right.set_title("line: none is both better and faster", fontsize=7)
    right.set_ylabel(f"{experiment.metrics[experiment.ranked_by]} [%], {mean}")
    if methods.empty:
        placeholder(left)
        placeholder(right)
        return figure, methods
    for is_level, color in ((True, BLUE), (False, GREY)):
        own = methods[methods.level == is_level]
        left.hlines(own.index, own.rank_low, own.rank_high, color=color, linewidth=0.8)
        left.plot(own["rank"], own.index, "o", color=color)
        right.plot(own.minutes, own.accuracy, "o", color=color)
    labels = [f"{method}  {place}" for place, method in enumerate(methods.method, start=1)]
    left.set_yticks(range(len(methods)), labels, fontsize=6)
    left.invert_yaxis()
    left.margins(y=0.02)
    right.margins(x=0.1)  # the first number is to the left of its point
    front = methods[methods.on_front].sort_values("minutes")
    right.plot(front.minutes, front.accuracy, color=VERMILION, linewidth=0.8, zorder=0)
    sides = cycle((("right", "bottom"), ("left", "top")))  # alternating, since neighbours may be close
    for place, method, (ha, va) in zip(front.index + 1, front.itertuples(), sides, strict=False):
        right.annotate(f" {place} ", (method.minutes, method.accuracy), fontsize=6, ha=ha, va=va)
    return figure, methods


def ranked(experiment: Experiment, records: Records) -> pd.DataFrame:
    """Rank the methods that have outcomes in every column, the best first."""
    metric = experiment.ranked_by
    lines = {row: [records.get((row, column)) for column in experiment.columns] for row in experiment.rows}
    known = {row: [record for record in line if record and metric in record.outcomes] for row, line in lines.items()}
    methods = [row for row in experiment.rows if row not in experiment.unranked]
    whole = {row: known[row] for row in methods if len(known[row]) == len(experiment.columns)}
    if not whole:
        return pd.DataFrame(columns=RANKING_COLUMNS)
    columns = zip(*whole.values(), strict=True)
    outcomes = [np.array([unpacked(record.outcomes[metric]) for record in column]) for column in columns]
    sizes = [column.shape[1] for column in outcomes]
    # How often each test image is taken, `[draws, size]`.
    draws = {size: np.random.default_rng(0).multinomial(size, np.full(size, 1 / size), NUM_DRAWS) for size in sizes}
    (ranks,) = mean_ranks(outcomes, [np.ones((1, size)) for size in sizes])
    drawn = mean_ranks(outcomes, [draws[size] for size in sizes])
    low, high = np.percentile(drawn, INTERVAL, axis=0)
    ahead = np.percentile(drawn - drawn[:, [ranks.argmin()]], INTERVAL[0], axis=0)
    minutes = [[record.values.get("total_minutes", np.nan) for record in line] for line in whole.values()]
    table = pd.DataFrame(
        {
            "method": list(whole),
            "rank": ranks,
            "rank_low": low,
            "rank_high": high,
            "level": ahead <= 0,
            "accuracy": [np.mean([record.metrics[metric] for record in line]) for line in whole.values()],
            "minutes": np.mean(minutes, axis=1),
        }
    ).sort_values(["rank", "minutes"], ignore_index=True)
    timed = table.fillna({"minutes": np.inf})  # the original needs none
    by_accuracy = timed.sort_values(["accuracy", "minutes"], ascending=[False, True])
    return table.assign(on_front=by_accuracy.minutes < by_accuracy.minutes.cummin().shift(fill_value=np.inf))


def throughput(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot a panel per network with bars by device, each with its ratio to the original; the paper's are hatched."""
    columns = dict.fromkeys(column for _, column in records)
    places = [(row, column) for column in columns for row, own in records if own == column]
    found = [bar for place in places for bar in _bars(experiment, *place, records[place])]
    bars = pd.DataFrame(found, columns=SPEED_COLUMNS)
    figure, every = panels(len(columns), 2.4)
    for axes, column in zip(every, columns, strict=True):
        axes.set(title=column, ylabel="images / s")
        groups = dict(list(bars[bars.column == column].groupby("row", sort=False)))
        for place, (row, group) in enumerate(groups.items()):
            _draw(axes, place, group, hatch=None if records[row, column] else PUBLISHED)
        if not groups:
            placeholder(axes)
        own = {row: ", small stand-in" for row in groups if is_mini(records[row, column])}
        labels = [fill(row + own.get(row, ""), CHARACTERS_OF_DEVICE, break_on_hyphens=False) for row in groups]
        axes.set_xticks(range(len(groups)), labels, fontsize=6)
        set_height(axes, bars[bars.column == column].throughput.dropna())
    measured = bars.dropna(subset="throughput")
    shown = (BARS[name] for name in BARS if name in set(measured.network))
    handles = [Patch(color=color, label=label) for label, color in shown]
    if handles and None in records.values():
        handles.append(Patch(facecolor="white", edgecolor=BLACK, hatch=PUBLISHED, label="the paper's"))
    if handles:
        style = {"ncols": len(handles), "fontsize": 6, "frameon": False, "title_fontsize": 6}
        title = "Lines: half the interquartile range to both sides. "
        title += "Numbers: times the original (2:4: in half precision)."
        figure.legend(handles=handles, loc="outside lower center", title=title, **style)
    return figure, measured


def is_mini(record: Record | None) -> bool:
    return bool(record and record.identity.get("profile") == "mini")


def _bars(experiment: Experiment, row: str, column: str, record: Record | None) -> Iterable[dict[str, Any]]:
    """List the speeds of a device's networks with their ratios; networks that it cannot run have none."""
    analysis = record.analysis if record else {}
    speeds, missing = analysis.get("speeds", {}), analysis.get("missing", {})
    if record is None:
        published = paper_values(experiment.name).items()
        found = {metric: value for (*place, metric), value in published if place == [row, column]}
        speeds = {name: {"throughput": found[name + THROUGHPUT]} for name in BARS if name + THROUGHPUT in found}
    for name in BARS:
        place = {"row": row, "column": column, "network": name}
        base = speeds.get(BASES.get(name, "dense"))
        if name in missing:
            yield place
        elif name in speeds:
            ratio = speeds[name]["throughput"] / base["throughput"] if base else None
            yield {**place, **speeds[name], "ratio": ratio}


def _draw(axes: Axes, place: int, bars: pd.DataFrame, hatch: str | None) -> None:
    """Draw one device's group, bars side by side."""
    width = 0.8 / len(bars)
    for number, bar in enumerate(bars.fillna({"spread": 0}).itertuples()):
        left = place + (number - (len(bars) - 1) / 2) * width
        if pd.isna(bar.throughput):
            axes.text(left, 0, "n.a.", transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=5)
            continue
        error, color = bar.spread * bar.throughput / 2, BARS[bar.network][1]
        style: dict[str, Any] = {"error_kw": {"elinewidth": 0.6}, "hatch": hatch, "edgecolor": BLACK, "lw": 0.3}
        axes.bar(left, bar.throughput, width, color=color, yerr=error, **style)
        if pd.notna(bar.ratio):
            axes.annotate(f"{bar.ratio:.2f}", (left, bar.throughput + error), ha="center", va="bottom", fontsize=5)


def set_height(axes: Axes, speeds: pd.Series) -> None:
    """Let bars start at zero, or at a power of ten if the speeds differ by more than one."""
    if speeds.empty or speeds.max() < 10 * speeds.min():
        axes.set_ylim(0, 1.15 * speeds.max() if len(speeds) else 1)
    else:
        low, high = np.floor(np.log10(speeds.min())), np.ceil(np.log10(1.3 * speeds.max()))
        axes.set(yscale="log", ylim=(10**low, 10**high))
