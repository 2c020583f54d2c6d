"""Shared style of all figures: colours that the colour-blind can distinguish, sizes, and records by row and column."""

from collections.abc import Callable
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.config import Experiment
from experiments.record import Record

# Okabe and Ito's colours.
BLUE, VERMILION, GREEN, ORANGE, BLACK, GREY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#000000", "#999999"
CURVES = (ORANGE, VERMILION, GREEN, BLUE, BLACK)  # colours of methods, in order
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.grid": True,
    "grid.alpha": 0.4,
    "grid.linestyle": "--",
    "lines.linewidth": 0.9,
    "lines.markersize": 3,
    "figure.constrained_layout.use": True,
    "pdf.fonttype": 42,
}
WIDTH = 6.9  # inches: two columns of the paper

Records = dict[tuple[str, str], Record | None]
Drawing = Callable[[Experiment, Records], tuple[Figure, pd.DataFrame]]


def say(axes: Axes, what: str = "not measured") -> None:
    """Write words in place of a plot."""
    axes.text(0.5, 0.5, what, ha="center", transform=axes.transAxes)


def joined(parts: list[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    """Join the plotted values into one table; empty if nothing was measured."""
    return pd.concat(parts)[columns] if parts else pd.DataFrame(columns=columns)
