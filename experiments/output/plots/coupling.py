"""Couplings between tokens and within tokens, as in the paper's motivation."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from experiments.config import Experiment
from experiments.output.plots.style import BLACK, BLUE, GREY, VERMILION, WIDTH, Records, joined, say
from experiments.record import Record

SIGNIFICANT = 0.05
COLUMNS = ["column", "token", "other", "coupling", "distance_correlation", "p_value"]


def token_couplings(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot, for each column, the cross-token map above and the distance correlations of its tokens below."""
    (row,) = experiment.rows
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    maps, tokens = (
        part.subplots(1, len(experiment.columns), squeeze=False)[0]
        for part in figure.subfigures(2, 1, squeeze=False, height_ratios=(3, 2))[:, 0]
    )
    values = []
    for above, below, column in zip(maps, tokens, experiment.columns, strict=True):
        values += _draw_map(above, records[row, column], column) + _draw_tokens(below, records[row, column], column)
    return figure, joined(values, COLUMNS)


def motivation(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot the couplings of one layer (first row), and the similarity of estimators against accuracy."""
    (column,) = experiment.columns
    row, *estimators = experiment.rows
    figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    values = _draw_map(first, records[row, column], column) + _draw_tokens(second, records[row, column], column)
    values += _draw_similarity(third, {name: records[name, column] for name in estimators}, column)
    return figure, joined(values, [*COLUMNS, "estimator", "cosine", "cosine_error", "top1"])


def _draw_map(axes: Axes, record: Record | None, title: str) -> list[pd.DataFrame]:
    axes.set(xlabel="token index", ylabel="token index")
    axes.grid(visible=False)
    if not (record and record.analysis):
        axes.set_title(title)
        say(axes)
        return []
    coupling = np.array(record.analysis["coupling"])
    axes.set_title(f"{title}\n{record.analysis['layer']}", fontsize=7)
    if coupling.any():
        # Logarithmic, since a few tokens can outweigh all others; pairs that never meet are left blank.
        image = axes.imshow(np.ma.masked_equal(coupling, 0), cmap="cividis", norm="log")
        bar = axes.figure.colorbar(image, ax=axes, location="bottom", shrink=0.9, aspect=25)
        bar.set_label("coupling / mean diagonal", fontsize=7)
        bar.ax.xaxis.set_minor_formatter(NullFormatter())
    else:
        say(axes, "no coupling")
    token, other = np.indices(coupling.shape).reshape(2, -1)
    found = pd.DataFrame({"column": title, "token": token, "other": other, "coupling": coupling.flatten()})
    return [found[found.token <= found.other].reindex(columns=COLUMNS)]  # it is symmetric


def _draw_tokens(axes: Axes, record: Record | None, title: str) -> list[pd.DataFrame]:
    axes.set(xlabel="token index", ylabel="distance correlation")
    if not (record and record.analysis):
        say(axes)
        return []
    tokens = pd.DataFrame({key: record.analysis[key] for key in ("distance_correlation", "p_value")}, dtype=float)
    tokens = tokens.rename_axis("token").reset_index().assign(column=title)
    sure = tokens.p_value < SIGNIFICANT
    for part, color in ((sure, BLUE), (~sure, GREY)):
        axes.plot(tokens.token[part], tokens.distance_correlation[part], "x", color=color, markersize=3)
    mean = tokens.distance_correlation.mean()
    axes.axhline(mean, color=BLACK, linestyle="--", linewidth=0.9)
    axes.set_title(f"mean {mean:.2f}; grey: p ≥ {SIGNIFICANT}", fontsize=7)
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    return [tokens.reindex(columns=COLUMNS)]


def _draw_similarity(axes: Axes, records: dict[str, Record | None], column: str) -> list[pd.DataFrame]:
    axes.set(xlabel="cosine to the empirical Fisher", ylabel="top-1 [%]")
    axes.margins(x=0.5, y=0.1)
    points: list[dict[str, Any]] = [
        {
            "column": column,
            "estimator": name,
            **{key: record.metrics[key] for key in ("cosine", "cosine_error", "top1")},
        }
        for name, record in records.items()
        if record and "cosine" in record.metrics
    ]
    if not points:
        say(axes)
        return []
    for point in points:
        axes.errorbar(
            point["cosine"], point["top1"], xerr=point["cosine_error"], fmt="o", color=VERMILION, markersize=3
        )
        place: dict[str, Any] = {"xytext": (4, -2), "textcoords": "offset points", "fontsize": 6}
        axes.annotate(point["estimator"], (point["cosine"], point["top1"]), **place)
    return [pd.DataFrame(points)]
