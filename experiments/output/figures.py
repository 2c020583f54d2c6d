"""Figures of accuracy, against a choice of a method and against cost, and the parts that all figures share.

A figure is drawn from its values alone, which its CSV holds, and its title says what they show. The style, and the
parts that figures share, come first.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import cycle
from math import nan
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.config import Experiment
from experiments.record import ERRORS_APART, Record, paired_difference, standard_error, unpacked

# Okabe and Ito's colours, which the colour-blind can distinguish.
BLUE, VERMILION, GREEN, ORANGE, BLACK, GREY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#000000", "#999999"
PURPLE, SKY = "#CC79A7", "#56B4E9"
COLUMN_COLORS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)  # of networks, in order
# FACTS has the colour of what it compresses in every figure, other estimators are grey; marks tell those of one colour
# apart.
PART_COLORS = {"layers": BLUE, "pivoted": SKY, "units": GREEN, "tokens": PURPLE, "units,tokens": VERMILION}
MINUS = "\N{MINUS SIGN}"
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

Records = Mapping[tuple[str, str], Record | None]


class Drawing(NamedTuple):
    """How a figure's values are found in records by row and column, and how they are drawn, with a message."""

    values: Callable[[Experiment, Records], pd.DataFrame]
    draw: Callable[[Experiment, pd.DataFrame], tuple[Figure, str]]


CHARACTERS_OF_LABEL = 10  # per line
CHARACTERS_OF_NAME = 26  # the same, of a method beside its curve
CHARACTERS_OF_NOTE = 84  # the same, over all panels
CHARACTERS_OF_AXIS = 70  # labels that need more than this at equal width are rotated
MOST_LABELS = 12  # beside each other on an axis
MOST_SERIES = 6
TURNED: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
MOST_LOST = 8  # times the median loss, on an axis
LEAST_CUT = 5  # percentage points: an axis reaches at least as far
LEAST_SPAN = 2  # percentage points on an axis, so that noise looks like noise
THIN: dict[str, Any] = {"elinewidth": 0.4, "capsize": 1.5, "capthick": 0.4}  # error bars of many curves
BESIDE = 0.008  # of the axis between curves at one value, so that error bars do not hide each other
LINE = 0.065  # of the axis between lines of labels beside curves
SAMPLE = 1.01, 1.04, 1.07  # of the axis, where a curve's line and mark stand before its name


def panels(
    columns: int, height: float, rows: int = 1, width: float = WIDTH, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """Make a figure with panels side by side, which may share axes; sizes are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **shared).flat)


def placeholder(axes: Axes) -> None:
    """Say in place of a plot that nothing was measured."""
    axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)


def joined(parts: list[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    """Join the plotted values into one table; empty if nothing was measured."""
    return pd.concat(parts).reindex(columns=columns) if parts else pd.DataFrame(columns=columns)


def metrics_of(records: Records, *metrics: str) -> pd.DataFrame:
    """Collect metrics by row and column, and the last one's error, one line per record; NaN where it lacks one."""
    found = []
    for place, record in records.items():
        if record:
            shares = record.outcomes.get(metrics[-1])
            error = standard_error(unpacked(shares)) if shares else nan
            found.append((*place, *(record.values.get(metric, nan) for metric in metrics), error))
    return pd.DataFrame(found, columns=["row", "column", *metrics, "standard_error"])


def with_differences(points: pd.DataFrame, records: Records, reference: str, metric: str) -> pd.DataFrame:
    """Add how far each point is ahead of the `reference` row in its column, on the same images."""
    places = zip(points.row, points.column, strict=True)
    pairs = [(records[row, column], records.get((reference, column))) for row, column in places]
    found = [paired_difference(own, other, metric) if own and other else (nan, nan) for own, other in pairs]
    return points.join(pd.DataFrame(found, points.index, ["difference", "difference_error"], dtype=float))


def name_curves(axes: Axes, ends: Mapping[str, tuple[float, Mapping[str, Any]]]) -> None:
    """Write names beside the ends of curves, with their marks, by their heights and styles, at a distance."""
    low, high = axes.get_ylim()
    names = sorted(ends, key=lambda name: -ends[name][0])
    texts = {name: fill(name, CHARACTERS_OF_NAME, break_on_hyphens=False) for name in names}
    halves = {name: LINE * (texts[name].count("\n") + 1) / 2 for name in names}
    places, top, bottom = {}, 2.0, 0.0
    for name in names:
        places[name] = min((np.clip(ends[name][0], low, high) - low) / (high - low), top - halves[name])
        top = places[name] - halves[name]
    for name in reversed(names):  # those below the axis move up
        places[name] = max(places[name], bottom + halves[name])
        bottom = places[name] + halves[name]
        look: dict[str, Any] = {"clip_on": False, "transform": axes.transAxes}
        axes.plot(SAMPLE, [places[name]] * len(SAMPLE), markevery=[1], **ends[name][1], **look)
        look |= {"color": ends[name][1]["color"]}
        axes.text(SAMPLE[-1] + 0.01, places[name], texts[name], fontsize=6, va="center", **look)


def span(values: Iterable[float], form: str = ".2g") -> str:
    """Write the least and the greatest value."""
    return " to ".join(dict.fromkeys(f"{value:{form}}" for value in (min(values), max(values))))


def one_legend(axes: Axes, **place: Any) -> None:
    """Name each kind of points once, within one panel."""
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    if handles:
        axes.legend(handles.values(), handles.keys(), fontsize=6, **place)


def ablation_values(experiment: Experiment, records: Records) -> pd.DataFrame:
    """Collect the ranked metric of every row and column, and its difference from the default's or the first row."""
    points = metrics_of(records, experiment.ranked_by).dropna(subset=experiment.ranked_by)
    reference = experiment.default or next(iter(experiment.rows))
    return with_differences(points, records, reference, experiment.ranked_by)


def draw_ablation(experiment: Experiment, values: pd.DataFrame) -> tuple[Figure, str]:
    """Plot differences from the default or the first row by column; lines join numbers."""
    figure, (axes,) = panels(1, 2.8, width=0.75 * WIDTH)
    reference = f"the default, {experiment.default}" if experiment.default else next(iter(experiment.rows))
    places, scale, linestyle = axis_places([*experiment.rows])
    axes.set(xlabel=experiment.axis_title, xscale=scale)
    of_axis = "the default" if experiment.default else reference  # the message has its value
    axes.set_ylabel(f"{experiment.metrics[experiment.ranked_by]}: points from {of_axis}")
    axes.minorticks_off()
    axes.axhline(0, color=BLACK, linewidth=0.5)
    ends = {}
    for number, (column, color, marker) in enumerate(zip(experiment.columns, cycle(COLUMN_COLORS), cycle(MARKERS))):
        own = values[values.column == column].set_index("row").reindex(experiment.rows)
        own = own.iloc[np.argsort(places)]
        x, beside = np.sort(places), BESIDE * number
        x = x * (x[-1] / x[0]) ** beside if scale == "log" else x + (np.ptp(x) or 1) * beside
        style: dict[str, Any] = {"marker": marker, "color": color, "linestyle": linestyle, "label": column}
        axes.errorbar(x, own.difference, own.difference_error, capsize=2, **style)
        ends[column] = own.difference.iloc[-1], style
    low, high = axes.get_ylim()
    room = max(0, LEAST_SPAN - (high - low)) / 2
    axes.set_ylim(low - room, high + room)
    labels = [fill(row, CHARACTERS_OF_LABEL, break_long_words=False) for row in experiment.rows]
    widest = max(len(line) for label in labels for line in label.splitlines())
    is_wide = widest * len(labels) > CHARACTERS_OF_AXIS
    axes.set_xticks(places, [*experiment.rows] if is_wide else labels, **(TURNED if is_wide else {}))
    axes.margins(x=0.08)
    name_curves(axes, {column: end for column, end in ends.items() if end[0] == end[0]})
    known = values.difference_error.notna().any()
    axis = experiment.axis_title
    return figure, f"{axis[:1].upper()}{axis[1:]}: {_gains_and_costs(values, reference)}" if known else ""


def _gains_and_costs(values: pd.DataFrame, reference: str) -> str:
    """Name the value that gains most over the reference in any column, and the one that costs most."""
    apart = values[values.difference.abs() > ERRORS_APART * values.difference_error].sort_values("difference")
    if apart.empty:
        return f"no value is two standard errors from {reference}"
    least, most = (apart.iloc[place] for place in (0, -1))
    gain, cost = (f"{abs(each.difference):.1f} ± {each.difference_error:.1f} points" for each in (most, least))
    text = (
        f"{most.row} gains {gain} over {reference} ({most.column})"
        if most.difference > 0
        else f"no value gains over {reference}"
    )
    joined_by = ", but" if most.difference > 0 and least.row == most.row else f"; {least.row}"
    return text + f"{joined_by} costs {cost} ({least.column})" * bool(least.difference < 0)


def axis_places(rows: list[str]) -> tuple[np.ndarray, str, str]:
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


def steps_values(experiment: Experiment, records: Records) -> pd.DataFrame:
    """Collect FLOPs and top-1 by column and method, and the differences from the first row."""
    points = metrics_of(records, "gflops", "top1").dropna(subset=["gflops", "top1"])
    points = with_differences(points, records, next(iter(experiment.rows)), "top1")
    return points.rename(columns={"row": "method"})


def draw_steps(experiment: Experiment, values: pd.DataFrame) -> tuple[Figure, str]:
    """Plot the differences of the best methods from the first row by column, a panel per network."""
    reference, networks = next(iter(experiment.rows)), defaultdict[str, list[str]](list)
    for column in experiment.columns:
        networks[column.partition(", ")[0]].append(column)
    figure, every = panels(len(networks), 2.9, sharey=True)
    differences = values[values.method != reference].groupby("method").difference
    number, best = differences.count(), [*differences.mean().nlargest(MOST_SERIES - 1).index]
    best = [row for row in experiment.drawn if number.get(row)] or best
    drawn = {row: style_of(row, experiment) for row in best}
    for axes, (network, columns) in zip(every, networks.items(), strict=True):
        axes.set_title(network)
        axes.axhline(0, **style_of(reference, experiment))
        for place, (method, style) in enumerate(drawn.items()):
            curve = values[values.method == method].set_index("column").reindex(columns)
            places = np.arange(len(columns)) + BESIDE * max(len(columns) - 1, 1) * (place - len(drawn) // 2)
            axes.errorbar(places, curve.difference, curve.difference_error, **style, **THIN)
        shares = [column.partition(", ")[2] or column for column in columns]
        axes.set_xticks(range(len(columns)), shares)
        axes.set_xlabel("FLOPs that remain" * shares[0].endswith("%"))
    every[0].set_ylabel(f"Top-1: points from {_uncapitalised(reference)}, ± standard error")
    shown, which = values[values.method.isin(drawn)], f"{len(drawn)}" if experiment.drawn else f"the {len(drawn)} best"
    left_out = [f"{which} of {sum(number > 0)} methods"] * bool(sum(number > 0) > len(drawn))
    left_out += ["lower points are cut off"] * has_cut_where_methods_differ(every[0], shown.difference)
    if left_out:
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        text = fill(f"{', '.join(left_out)}: see the table", CHARACTERS_OF_NOTE // len(networks))
        every[0].text(0.01, 0.03, text, fontsize=6, ha="left", bbox=ground, transform=every[0].transAxes)
    last = shown.dropna(subset="difference").groupby("method").difference.last()
    ends = {method: (height, drawn[method]) for method, height in last.items()}
    name_curves(every[-1], ends | {reference: (0.0, style_of(reference, experiment))})
    in_all = [each for each in best if number[each] == number.max()]
    told = [values[values.method == each] for each in in_all[:2]]
    return figure, _message_on(told, _uncapitalised(reference)) if told else ""


def _message_on(told: list[pd.DataFrame], reference: str) -> str:
    """Say down to which share the first method is level with the reference, and how much it loses at most.

    If it never is, say how much the two methods lose.
    """
    own = told[0].assign(share=told[0].column.str.rpartition(", ")[2])
    is_level = own.difference >= -ERRORS_APART * own.difference_error
    shares = is_level.groupby(own.share, sort=False).all()
    level, last = shares[shares.cummin()].index, shares.index[-1]
    of_flops = " of the FLOPs" * last.endswith("%")
    if len(level) and len(shares) > 1:
        text = f"With {_in_a_sentence(own)}, at most {_loss(own[own.share.isin(level)])} below {reference} "
        text += f"down to {level[-1]}{of_flops}"
        return text + f"; at {last}, up to {_loss(own[own.share == last])}" * (len(level) < len(shares))
    spans = []
    for each in told:
        at_last = each[each.column.str.rpartition(", ")[2] == last]
        ends = (round(-lost, 1) + 0 for lost in (at_last.difference.max(), at_last.difference.min()))
        losses = " to ".join(dict.fromkeys(f"{end:.1f}" for end in ends)).replace("-", MINUS)
        spans.append(f"{losses}{_error(at_last.difference_error.max())} with {_in_a_sentence(each)}")
    where = f"At {last}{of_flops}, points " * (len(shares) > 1) or "Points "
    return where + f"below {reference}: {'; '.join(spans)}"


def _loss(own: pd.DataFrame) -> str:
    """The largest loss, with its error, and whose it is if there are several networks."""
    worst = own.loc[own.difference.idxmin()]
    network, comma, _ = worst.column.partition(", ")
    lost = f"{max(-worst.difference, 0):.1f}{_error(worst.difference_error)} points"
    return lost + f" ({network})" * bool(comma)


def _error(error: float) -> str:
    """Write an error after a value, if it is known."""
    return "" if np.isnan(error) else f" ± {error:.1f}"


def _in_a_sentence(own: pd.DataFrame) -> str:
    what, _, how = own.method.iloc[0].partition(": ")
    return f"{_uncapitalised(what)} ({how})" if how else _uncapitalised(what)


def _uncapitalised(text: str) -> str:
    """Begin with a small letter, unless the first word is a name, such as ToMe."""
    first, _, _ = text.partition(" ")
    return text.replace(first, first.lower(), 1) if first.istitle() else text


def style_of(row: str, experiment: Experiment) -> dict[str, Any]:
    """Choose a colour by what a method compresses and how, and a mark by its place; the original is black."""
    settings = dict(override.replace("'", "").split("=", 1) for override in experiment.rows.get(row, ()))
    parts = settings.get("parts") or ("pivoted" if settings.get("form") == "pivoted" else "layers")
    color = GREY if settings.get("estimator", "facts") != "facts" else PART_COLORS.get(parts, GREY)
    is_original, number = row in experiment.unranked, [*experiment.rows, row].index(row)
    return {
        "color": BLACK if is_original else color,
        "linestyle": ":" if is_original else "--" if "finetuning" in settings or "search" not in settings else "-",
        "marker": "" if is_original else MARKERS[number % len(MARKERS)],
    }


def has_cut_where_methods_differ(axes: Axes, differences: pd.Series) -> bool:
    """Cut an axis where some methods lose many times what most differ: they would press the others into one line."""
    most = max(LEAST_CUT, MOST_LOST * differences.abs().median())
    has_cut = bool(differences.min() < -most)
    if has_cut:
        axes.set_ylim(-most, max(0, differences.max()) + most / 5)
    return has_cut
