"""Images per second as bars, by device, beside those of the original network."""

from collections.abc import Iterable
from dataclasses import fields

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.config import Experiment
from experiments.output.plots.style import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILION, WIDTH, Records, say
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
    """Plot a panel a network and a group of bars a device; above each bar its ratio to the original.

    Where a device cannot run a network, a note says so. The paper's bars are hatched.
    """
    columns = dict.fromkeys(column for _, column in records)
    figure = Figure(figsize=(WIDTH, 2.4), layout="constrained")
    values: list[dict] = []
    for axes, column in zip(figure.subplots(1, len(columns), squeeze=False)[0], columns, strict=True):
        axes.set(title=column, ylabel="images / s", yscale="log")
        groups = {
            row: _bars(experiment, row, column, record) for (row, own), record in records.items() if own == column
        }
        groups = {row: bars for row, bars in groups.items() if bars}
        for place, (row, bars) in enumerate(groups.items()):
            _draw(axes, place, bars, is_measured=records[row, column] is not None)
            values += [{"row": row, "column": column, "network": name, **bar} for name, bar in bars.items() if bar]
        if not groups:
            say(axes)
        axes.set_xticks(range(len(groups)), groups, fontsize=6)
        axes.margins(y=0.15)
    known = [name for name in BARS if any(value["network"] == name for value in values)]
    handles = [Patch(color=BARS[name][1], label=BARS[name][0]) for name in known]
    if any(record is None for record in records.values()) and known:
        handles.append(Patch(facecolor="white", edgecolor=BLACK, hatch=PUBLISHED, label="the paper's"))
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=6, frameon=False)
    return figure, pd.DataFrame(values, columns=COLUMNS)


def _bars(experiment: Experiment, row: str, column: str, record: Record | None) -> dict[str, dict]:
    """Speed and ratio by network; empty for one that the device cannot run."""
    speeds = _speeds(record) if record else _published(experiment, row, column)
    missing = record.analysis.get("missing", {}) if record else {}
    bars = {}
    for name in (name for name in BARS if name in speeds or name in missing):
        base = speeds.get(BASES.get(name, "dense"))
        ratio = speeds[name]["throughput"] / base["throughput"] if name in speeds and base else None
        bars[name] = {} if name in missing else {**speeds[name], "ratio": ratio}
    return bars


def _draw(axes: Axes, place: int, bars: dict[str, dict], is_measured: bool) -> None:
    """Draw the group of one device, bars side by side."""
    width = 0.8 / len(bars)
    for (name, bar), left in zip(bars.items(), _centres(place, len(bars), width), strict=True):
        if not bar:
            axes.text(left, 0, "n.a.", transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=5)
            continue
        height, error = bar["throughput"], bar.get("spread", 0) * bar["throughput"] / 2
        hatch = None if is_measured else PUBLISHED
        axes.bar(left, height, width, color=BARS[name][1], yerr=error, hatch=hatch, edgecolor=BLACK, lw=0.3)
        if bar["ratio"]:
            axes.annotate(f"{bar['ratio']:.2f}", (left, height), ha="center", va="bottom", fontsize=5)


def _centres(place: int, number: int, width: float) -> Iterable[float]:
    return (place + (index - (number - 1) / 2) * width for index in range(number))


def _speeds(record: Record) -> dict[str, dict]:
    """In full, or, of a record that came without the values of its analysis, the throughput alone."""
    if "speeds" in record.analysis:
        return record.analysis["speeds"]
    return {
        name.removesuffix(THROUGHPUT): {"throughput": value}
        for name, value in record.metrics.items()
        if name.endswith(THROUGHPUT)
    }


def _published(experiment: Experiment, row: str, column: str) -> dict[str, dict]:
    return {
        metric.removesuffix(THROUGHPUT): {"throughput": value}
        for (own, other, metric), value in paper_values(experiment.name).items()
        if (own, other) == (row, column) and metric.endswith(THROUGHPUT)
    }
