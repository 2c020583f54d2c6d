"""Images per second as bars, by device, beside those of the original network."""

from collections.abc import Iterable
from dataclasses import fields

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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


def throughput(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot a panel a network and a group of bars a device; above each bar its ratio to the original.

    Where a device cannot run a network, a note says so. The paper's bars are hatched.
    """
    columns = dict.fromkeys(column for _, column in records)
    figure = Figure(figsize=(WIDTH, 2.4), layout="constrained")
    values: list[dict] = []
    for axes, column in zip(figure.subplots(1, len(columns), squeeze=False)[0], columns, strict=True):
        axes.set(title=column, ylabel="images / s", yscale="log")
        rows = [row for row, other in records if other == column]
        drawn = [row for place, row in enumerate(rows) if _group(axes, place, experiment, row, column, records, values)]
        if not drawn:
            say(axes)
        axes.set_xticks(range(len(rows)), rows, fontsize=6)
        axes.margins(y=0.15)
    known = {value["network"] for value in values}
    for name, (label, color) in BARS.items():
        if name in known:
            figure.axes[0].bar(0, 0, color=color, label=label)
    if known:
        figure.legend(loc="outside lower center", ncols=len(known), fontsize=6, frameon=False)
    return figure, pd.DataFrame(values, columns=COLUMNS)


def _group(
    axes: Axes, place: int, experiment: Experiment, row: str, column: str, records: Records, values: list[dict]
) -> bool:
    """Draw the bars of one device, and note their values; False if there are none."""
    record = records[row, column]
    speeds, missing = _speeds(record) if record else _published(experiment, row, column), _missing(record)
    shown = [name for name in BARS if name in speeds or name in missing]
    width = 0.8 / max(1, len(shown))
    for name, left in zip(shown, _centres(place, len(shown), width), strict=True):
        if name in missing:
            axes.annotate("n.a.", (left, axes.get_ylim()[0]), ha="center", va="bottom", fontsize=5)
            continue
        speed, base = speeds[name], speeds[BASES.get(name, "dense")]
        ratio, error = speed["throughput"] / base["throughput"], speed.get("spread", 0) * speed["throughput"] / 2
        hatch = None if record else "///"
        axes.bar(
            left, speed["throughput"], width, color=BARS[name][1], yerr=error, hatch=hatch, edgecolor=BLACK, lw=0.3
        )
        axes.annotate(f"{ratio:.2f}", (left, speed["throughput"]), ha="center", va="bottom", fontsize=5)
        values.append({"row": row, "column": column, "network": name, **speed, "ratio": ratio})
    return bool(shown)


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


def _missing(record: Record | None) -> dict[str, str]:
    return record.analysis.get("missing", {}) if record else {}
