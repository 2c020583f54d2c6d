"""Images per second as bars, by device, with their ratios to the original network's."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.config import Experiment
from experiments.output.plots.colors import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILION
from experiments.output.plots.style import Records, panels, say
from experiments.paper import paper_values
from experiments.record import Record
from facts.cost.speed import Speed

BARS = {
    "dense": ("original", BLUE),
    "residual": ("low rank, MemViT's residual", ORANGE),
    "compressed": ("low rank", GREEN),
    "half": ("original, half precision", GREY),
    "two_of_four": ("2:4 sparse, half precision", VERMILION),
}
BASES = {"two_of_four": "half"}  # of ratios, besides `dense`
COLUMNS = ["row", "column", "network", *(field.name for field in fields(Speed)), "ratio"]
THROUGHPUT = "_throughput"  # the ending of metrics
PUBLISHED = "///"  # hatching of the paper's bars


def throughput(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot a panel per network with bars by device, each with its ratio to the original; the paper's are hatched."""
    columns = dict.fromkeys(column for _, column in records)
    places = [(row, column) for column in columns for row, own in records if own == column]
    bars = pd.DataFrame([bar for place in places for bar in _bars(experiment, *place, records[place])], columns=COLUMNS)
    figure, every = panels(len(columns), 2.4)
    for axes, column in zip(every, columns, strict=True):
        axes.set(title=column, ylabel="images / s", yscale="log")
        groups = dict(list(bars[bars.column == column].groupby("row", sort=False)))
        for place, (row, group) in enumerate(groups.items()):
            _draw(axes, place, group, hatch=None if records[row, column] else PUBLISHED)
        if not groups:
            say(axes)
        axes.set_xticks(range(len(groups)), groups, fontsize=6)
        axes.margins(y=0.15)
    measured = bars.dropna(subset="throughput")
    handles = [
        Patch(color=color, label=label) for name, (label, color) in BARS.items() if name in set(measured.network)
    ]
    if handles and None in records.values():
        handles.append(Patch(facecolor="white", edgecolor=BLACK, hatch=PUBLISHED, label="the paper's"))
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=6, frameon=False)
    return figure, measured


def _bars(experiment: Experiment, row: str, column: str, record: Record | None) -> Iterable[dict[str, Any]]:
    """List the speeds of a device's networks with their ratios; networks that it cannot run have none."""
    if record and "speeds" in record.analysis:
        speeds = record.analysis["speeds"]
    else:  # published, or from a record without the values of its analysis
        paper = {
            metric: value for (*place, metric), value in paper_values(experiment.name).items() if place == [row, column]
        }
        found = record.metrics if record else paper
        speeds = {name: {"throughput": found[name + THROUGHPUT]} for name in BARS if name + THROUGHPUT in found}
    missing = record.analysis.get("missing", {}) if record else {}
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
        axes.bar(left, bar.throughput, width, color=color, yerr=error, hatch=hatch, edgecolor=BLACK, lw=0.3)
        if pd.notna(bar.ratio):
            axes.annotate(f"{bar.ratio:.2f}", (left, bar.throughput), ha="center", va="bottom", fontsize=5)
