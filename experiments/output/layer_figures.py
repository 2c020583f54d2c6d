"""Figures of layers: couplings of tokens, terms that the method drops, and sensitivities."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from experiments.config import Experiment
from experiments.output.figures import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    VERMILION,
    WIDTH,
    Records,
    joined,
    metrics_of,
    panels,
    placeholder,
    share_legend,
)
from experiments.record import Record
from facts.parts.base import candidate_ranks
from facts.search import interpolate_profile

SIGNIFICANT = 0.05
COLUMNS = ["column", "token", "other", "coupling", "distance_correlation", "p_value"]
CROSS_COLUMNS = ["column", "layer", "operator", "operator_error", "input_side", "grad_side", "loss"]
KINDS = {
    "operator": ("Fisher", "o", BLUE),
    "input_side": ("E[DᵀD]", "^", VERMILION),
    "grad_side": ("E[DDᵀ]", "s", GREEN),
    "loss": ("loss of the truncation", "x", ORANGE),
}


def token_couplings(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot for each column the cross-token map, and below it the distance correlations of its tokens."""
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
    figure, (first, second, third) = panels(3, 2.9)
    values = _draw_map(first, records[row, column], column) + _draw_tokens(second, records[row, column], column)
    values += _draw_similarity(third, {(name, column): records[name, column] for name in estimators})
    return figure, joined(values, [*COLUMNS, "estimator", "cosine", "cosine_error", "top1", "standard_error"])


def cross_moments(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot the ratio of the cross-token to the token-local part over the layers in order, one panel per network."""
    (row,) = experiment.rows
    num_rows = 1 + (len(experiment.columns) > 2)
    figure, every = panels(-(-len(experiment.columns) // num_rows), 0.8 + 1.8 * num_rows, num_rows)
    found = []
    for axes, column in zip(every, experiment.columns, strict=False):
        axes.set(title=column, xlabel="layer, in order", ylabel="cross-token / token-local")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        record = records[row, column]
        if not (record and record.analysis):
            placeholder(axes)
            continue
        layers = pd.DataFrame.from_dict(record.analysis, orient="index").rename_axis("layer").reset_index()
        for kind, (label, marker, color) in KINDS.items():
            if kind in layers:
                axes.plot(layers.index, layers[kind], marker, color=color, label=label)
        axes.axhline(0, color=BLACK, linewidth=0.5)
        found.append(layers.assign(column=column).reindex(columns=CROSS_COLUMNS))
    for axes in every[len(experiment.columns) :]:
        axes.set_visible(False)
    share_legend(figure, len(KINDS))
    return figure, joined(found, CROSS_COLUMNS)


def _draw_map(axes: Axes, record: Record | None, title: str) -> list[pd.DataFrame]:
    axes.set(xlabel="token index", ylabel="token index")
    axes.grid(visible=False)
    if not (record and record.analysis):
        axes.set_title(title)
        placeholder(axes)
        return []
    coupling = np.array(record.analysis["coupling"])
    axes.set_title(f"{title}\n{record.analysis['layer']}", fontsize=7)
    if coupling.any():
        # Logarithmic, since a few tokens can outweigh all others; pairs that never meet are left blank.
        image = axes.imshow(np.ma.masked_equal(coupling, 0), cmap="cividis", norm="log")
        bar = axes.figure.colorbar(image, ax=axes, location="bottom", shrink=0.9, aspect=25)
        bar.set_label("coupling / mean diagonal" + ("" if coupling.all() else "; white: none"), fontsize=7)
        bar.ax.xaxis.set_minor_formatter(NullFormatter())
    else:
        placeholder(axes, "no coupling")
    token, other = np.indices(coupling.shape).reshape(2, -1)
    found = pd.DataFrame({"column": title, "token": token, "other": other, "coupling": coupling.flatten()})
    return [found[found.token <= found.other].reindex(columns=COLUMNS)]  # it is symmetric


def _draw_tokens(axes: Axes, record: Record | None, title: str) -> list[pd.DataFrame]:
    axes.set(xlabel="token index", ylabel="squared distance correlation")
    if not (record and record.analysis):
        placeholder(axes)
        return []
    tokens = pd.DataFrame({key: record.analysis[key] for key in ("distance_correlation", "p_value")}, dtype=float)
    tokens = tokens.rename_axis("token").reset_index().assign(column=title)
    sure = tokens.p_value < SIGNIFICANT
    for part, color in ((sure, BLUE), (~sure, GREY)):
        axes.plot(tokens.token[part], tokens.distance_correlation[part], "x", color=color)
    mean = tokens.distance_correlation.mean()
    axes.axhline(mean, color=BLACK, linestyle="--")
    axes.set_title(f"mean {mean:.2f}" + ("" if sure.all() else f"; grey: p ≥ {SIGNIFICANT}"), fontsize=7)
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    return [tokens.reindex(columns=COLUMNS)]


def _draw_similarity(axes: Axes, records: Records) -> list[pd.DataFrame]:
    axes.set(xlabel="cosine to the empirical Fisher", ylabel="Top-1 [%] ± standard error")
    axes.margins(x=0.2, y=0.1)
    points = metrics_of(records, "cosine", "cosine_error", "top1").dropna(subset=["cosine", "top1"])
    points = points.rename(columns={"row": "estimator"})
    if points.empty:
        placeholder(axes)
        return []
    errors = {"xerr": points.cosine_error, "yerr": points.standard_error}
    axes.errorbar(points.cosine, points.top1, **errors, fmt="o", color=VERMILION, elinewidth=0.6)
    middle = (points.cosine.min() + points.cosine.max()) / 2
    for point in points.itertuples():  # labels point inwards, so that none crosses the frame
        shift, side = ((4, 3), "left") if point.cosine < middle else ((-4, 3), "right")
        place: dict[str, Any] = {"xytext": shift, "textcoords": "offset points", "ha": side, "fontsize": 6}
        axes.annotate(point.estimator, (point.cosine, point.top1), **place)
    return [points]


INTERPOLATED_LAYERS = ("blocks.1.attn.proj", "blocks.1.attn.qkv")


def sensitivity_interpolation(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot measured errors of two layers, their interpolation by windows, and one cubic spline through them."""
    (record,) = records.values()
    profile = record.summary.profile if record and record.summary else {}
    figure, every = panels(len(INTERPOLATED_LAYERS), 2.6)
    curves = []
    for axes, layer in zip(every, INTERPOLATED_LAYERS, strict=True):
        axes.set(title=layer, xlabel="remaining ratio", ylabel="KL divergence [nat]")
        if not profile:
            placeholder(axes)
            continue
        ranks, ratios, errors = np.array(profile[layer]).T
        candidates = candidate_ranks(int(ranks[0]), int(ranks[-1]), 8, at_least=len(ratios))
        offered = np.array(candidates) / round(ranks[-1] / ratios[-1])
        fine = np.linspace(ratios[0], ratios[-1], 161)
        drawn = {
            "windows (CoRS)": (offered, interpolate_profile(ratios, errors, offered)),
            "global cubic": (fine, interpolate_profile(ratios, errors, fine, "cubic")),
            "measured": (ratios, errors),
        }
        formats = (("s", BLUE, 2.5), ("-", VERMILION, 0), ("o", BLACK, 4))
        for (name, (x, y)), (line, color, size) in zip(drawn.items(), formats, strict=True):
            axes.plot(x, y, line, color=color, markersize=size, label=name)
            curves.append(pd.DataFrame({"layer": layer, "curve": name, "ratio": x, "error": y}))
        axes.axhline(0, color=BLACK, linewidth=0.5)
        axes.legend()
    return figure, joined(curves, ["layer", "curve", "ratio", "error"])
