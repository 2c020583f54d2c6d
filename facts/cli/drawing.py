"""A comparison as a table and as a figure."""

import itertools
from pathlib import Path

from rich.table import Table

from facts.compression.pareto import ORIGINAL, efficient
from facts.utils.extras import needing
from facts.utils.files import replacing

with needing("experiments", "a figure"):
    import pandas as pd
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

LOWER_IS_BETTER = ("perplexity",)
# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
MARKERS = "o^sDvP*"
TITLES = {
    "flops": "FLOPs of one input",
    "params": "parameters",
    "latency_ms": "latency of a batch [ms]",
    "top1": "top-1 accuracy [%]",
    "cosine": "cosine to the original's features",
    "perplexity": "perplexity",
}


def with_best(points: pd.DataFrame, cost: str, metric: str) -> pd.DataFrame:
    """Add a column `best`: whether no other compressed network beats that point."""
    compressed = points[points.estimator != ORIGINAL]
    quality = -compressed[metric] if metric in LOWER_IS_BETTER else compressed[metric]
    return points.assign(best=efficient(compressed[cost], quality).reindex(points.index, fill_value=False))


def table(points: pd.DataFrame, cost: str, metric: str) -> Table:
    """Table for the screen, with a star at the points that no other beats."""
    result = Table("estimator", "search", "form", "ratio", TITLES[cost], TITLES[metric], "", box=None)
    for point in points.to_dict("records"):
        figures = f"{point['ratio']:g}", EngFormatter()(point[cost]), f"{point[metric]:.4g}"
        result.add_row(point["estimator"], point["search"], point["form"], *figures, "*" if point["best"] else "")
    return result


def draw(points: pd.DataFrame, cost: str, metric: str, files: list[Path]) -> None:
    """Draw one line per method, the original dashed, and rings around points that no other beats. Write `files`."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=TITLES[cost], ylabel=TITLES[metric], yscale="log" if metric in LOWER_IS_BETTER else "linear")
    if cost != "latency_ms":
        axes.xaxis.set_major_formatter(EngFormatter())
    original = points[points.estimator == ORIGINAL]
    axes.axhline(original[metric].item(), color="grey", linestyle="--", linewidth=0.9, label=ORIGINAL)
    methods = points.drop(original.index).groupby(["estimator", "search", "form"], sort=False)
    formats = itertools.product(MARKERS, COLOURS)  # after all colours, the next marker
    for (method, own), (marker, colour) in zip(methods, formats, strict=False):
        own = own.sort_values(cost)
        axes.plot(own[cost], own[metric], marker=marker, color=colour, markersize=4, label=", ".join(method))
    best = points[points.best]
    axes.plot(best[cost], best[metric], "o", markersize=9, fillstyle="none", color="black", label="beaten by none")
    axes.grid(alpha=0.4, linestyle="--")
    axes.legend(fontsize=8)
    for file in files:
        with replacing(file) as path:
            figure.savefig(path, format=file.suffix.removeprefix("."), dpi=200)
