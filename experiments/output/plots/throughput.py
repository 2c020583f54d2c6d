"""Images per second as bars, beside those of the original network."""

from dataclasses import fields

import pandas as pd
from matplotlib.figure import Figure

from experiments.config import Experiment
from experiments.output.plots.style import BLUE, GREEN, ORANGE, VERMILION, WIDTH, Records, say
from facts.cost.speed import Speed

BARS = {
    "dense": ("original", BLUE),
    "two_of_four": ("2:4 sparse", VERMILION),
    "residual": ("low rank, MemViT's residual", ORANGE),
    "compressed": ("low rank", GREEN),
}
COLUMNS = ["row", "column", "network", *(field.name for field in fields(Speed)), "ratio"]


def throughput(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot a panel a network; above each bar its ratio to the original, or a note if this device cannot run it."""
    figure = Figure(figsize=(WIDTH, 2.4), layout="constrained")
    values = []
    for axes, ((row, column), record) in zip(
        figure.subplots(1, len(records), squeeze=False)[0], records.items(), strict=True
    ):
        axes.set(title=column, ylabel="images / s")
        if record is None or "speeds" not in record.analysis:
            say(axes)
            continue
        speeds, missing = record.analysis["speeds"], record.analysis["missing"]
        shown = [name for name in BARS if name in speeds or name in missing]
        for place, name in enumerate(shown):
            if name in missing:
                axes.text(place, 0, "n.a.", ha="center", va="bottom")
                continue
            speed, (_, color) = speeds[name], BARS[name]
            ratio = speed["throughput"] / speeds["dense"]["throughput"]
            error = speed["spread"] * speed["throughput"] / 2
            axes.bar(place, speed["throughput"], color=color, yerr=error, capsize=2)
            axes.annotate(f"{ratio:.2f}x", (place, speed["throughput"]), ha="center", va="bottom", fontsize=7)
            values.append({"row": row, "column": column, "network": name, **speed, "ratio": ratio})
        axes.set_xticks(range(len(shown)), [BARS[name][0] for name in shown], fontsize=6)
        axes.margins(y=0.15)
    return figure, pd.DataFrame(values, columns=COLUMNS)
