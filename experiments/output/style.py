"""Shared style and parts of all figures, and values of records."""

from collections.abc import Callable
from math import nan
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.config import Experiment
from experiments.record import Record, standard_error, unpacked

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
    """Collect metrics by row and column, and the last one's error, one line per record; NaN where it lacks one."""
    known = {place: record for place, record in records.items() if record}
    found = [(*place, *map(each.metrics.get, metrics), error_of(each, metrics[-1])) for place, each in known.items()]
    return pd.DataFrame(found, columns=["row", "column", *metrics, "standard_error"])


def error_of(record: Record, metric: str) -> float:
    """Compute the standard error of a metric that is a share of test samples; NaN for others."""
    return standard_error(unpacked(record.outcomes[metric])) if metric in record.outcomes else nan


def share_legend(figure: Figure, columns: int) -> None:
    """Put one legend of all panels below them."""
    handles = {
        label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)
