"""Shared style and parts of all figures, and values of records."""

from collections.abc import Callable
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.config import Experiment
from experiments.record import Record

# Okabe and Ito's colours, which the colour-blind can distinguish.
BLUE, VERMILION, GREEN, ORANGE, BLACK, GREY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#000000", "#999999"
CURVES = (BLUE, VERMILION, GREEN, ORANGE, "#CC79A7", "#56B4E9")  # of methods, in order; black is the original's
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


def panels(
    columns: int, height: float, rows: int = 1, width: float = WIDTH, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """Make a figure with panels side by side; sizes are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, sharey=sharey).flat)


def say(axes: Axes, what: str = "not measured") -> None:
    """Write words in place of a plot."""
    axes.text(0.5, 0.5, what, ha="center", transform=axes.transAxes)


def joined(parts: list[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    """Join the plotted values into one table; empty if nothing was measured."""
    return pd.concat(parts)[columns] if parts else pd.DataFrame(columns=columns)


def metrics_of(records: Records, *metrics: str) -> pd.DataFrame:
    """Collect metrics by row and column, one line per record; NaN where a record lacks one."""
    found = [(*place, *map(record.metrics.get, metrics)) for place, record in records.items() if record]
    return pd.DataFrame(found, columns=["row", "column", *metrics])


def share_legend(figure: Figure, columns: int) -> None:
    """Put one legend of all panels below them."""
    handles = {
        label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)
