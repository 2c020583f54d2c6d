"""Figures of layers: couplings of tokens, terms that the method drops, and sensitivities."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
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
    Records,
    joined,
    metrics_of,
    panels,
    placeholder,
    span,
    with_differences,
)
from experiments.record import ERRORS_APART
from facts.parts.base import candidate_ranks
from facts.search import interpolate_profile

SIGNIFICANT = 0.05
COLOURED = 0.01, 0.99  # quantiles of couplings between which colours differ
COLUMNS = ["column", "layer", "token", "other", "coupling", "distance_correlation", "p_value"]
MOTIVATION_COLUMNS = [*COLUMNS, "estimator", "cosine", "cosine_error", "top1", "standard_error"]
MOTIVATION_COLUMNS += ["difference", "difference_error"]  # from the one with the highest top-1
CROSS_COLUMNS = ["column", "layer", "operator", "operator_error", "input_side", "grad_side", "loss"]
KINDS = {
    "operator": ("Fisher", "o", BLUE),
    "input_side": ("E[DᵀD], of inputs", "^", VERMILION),
    "grad_side": ("E[DDᵀ], of gradients", "s", GREEN),
    "loss": ("loss of the truncation", "x", ORANGE),
}


def coupling_values(experiment: Experiment, records: Records) -> pd.DataFrame:
    """List the pairs of tokens and the tokens of each column: couplings, and distance correlations."""
    found = []
    for (_, column), record in records.items():
        if record and "coupling" in record.analysis:
            coupling = np.array(record.analysis["coupling"])
            token, other = np.triu_indices_from(coupling)  # it is symmetric
            own = pd.DataFrame({"token": token, "other": other, "coupling": coupling[token, other]})
            tokens = {key: record.analysis[key] for key in ("distance_correlation", "p_value")}
            own = pd.concat([own, pd.DataFrame(tokens, dtype=float).rename_axis("token").reset_index()])
            found.append(own.assign(column=column, layer=record.analysis["layer"]))
    return joined(found, COLUMNS)


def draw_couplings(experiment: Experiment, values: pd.DataFrame) -> tuple[Figure, str]:
    """Plot for each column the cross-token map, and below it the distance correlations of its tokens, on one scale."""
    figure, every = panels(len(experiment.columns), 4.6, 2)
    maps, tokens = every[: len(experiment.columns)], every[len(experiment.columns) :]
    _draw_maps(maps, experiment, values)
    _draw_tokens(tokens, experiment, values)
    off = values[values.token != values.other].groupby("column").coupling.median()
    return figure, f"In the median, two tokens are coupled by {span(100 * off)} % of a token's own coupling"


def motivation_values(experiment: Experiment, records: Records) -> pd.DataFrame:
    """List the couplings of one layer (first row), and the similarity of estimators with their accuracy."""
    couplings = coupling_values(experiment, records)
    first = next(iter(experiment.rows))
    estimators = {place: record for place, record in records.items() if place[0] != first}
    points = metrics_of(estimators, "cosine", "cosine_error", "top1").dropna(subset=["cosine", "top1"])
    if len(points):
        points = with_differences(points, estimators, points.row[points.top1.idxmax()], "top1")
    return joined([couplings, points.rename(columns={"row": "estimator"})], MOTIVATION_COLUMNS)


def draw_motivation(experiment: Experiment, values: pd.DataFrame) -> tuple[Figure, str]:
    """Plot the couplings of one layer, and the similarity of estimators against accuracy."""
    figure, (first, second, third) = panels(3, 2.9)
    points, couplings = values.dropna(subset="cosine"), values[values.cosine.isna()]
    _draw_maps([first], experiment, couplings)
    _draw_tokens([second], experiment, couplings)
    _draw_similarity(third, points)
    if points.empty:
        return figure, ""
    closest, best = (points.loc[points[metric].idxmax()] for metric in ("cosine", "top1"))
    level = (
        points[points.difference >= -ERRORS_APART * points.difference_error].drop(best.name, errors="ignore").estimator
    )
    has = f"of those shown, {best.estimator} has"
    has = "it has" if closest.estimator == best.estimator else has
    text = f"{closest.estimator} is closest to the Fisher; {has} the highest top-1"
    return figure, text + f", level with {', '.join(level)}" * bool(len(level))


def cross_values(experiment: Experiment, records: Records) -> pd.DataFrame:
    """List the ratios of the cross-token to the token-local part by layer."""
    found = []
    for (_, column), record in records.items():
        if record and record.analysis:
            layers = pd.DataFrame.from_dict(record.analysis, orient="index").rename_axis("layer").reset_index()
            found.append(layers.assign(column=column).reindex(columns=CROSS_COLUMNS))
    return joined(found, CROSS_COLUMNS)


def draw_cross_moments(experiment: Experiment, values: pd.DataFrame) -> tuple[Figure, str]:
    """Plot the ratio of the cross-token to the token-local part over the layers in order, one panel per network."""
    num_rows = 1 + (len(experiment.columns) > 2)
    figure, every = panels(-(-len(experiment.columns) // num_rows), 0.8 + 1.8 * num_rows, num_rows, sharey=True)
    for axes, column in zip(every, experiment.columns, strict=False):
        axes.set(title=column, xlabel="layer, in order")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        layers = values[values.column == column].reset_index()
        if layers.empty:
            placeholder(axes)
        for kind, (label, marker, color) in KINDS.items():
            if layers[kind].notna().any():
                axes.plot(layers.index, layers[kind], marker, color=color, label=label)
        axes.axhline(0, color=BLACK, linewidth=0.5)
    for axes in every[len(experiment.columns) :]:
        axes.set_visible(False)
    every[0].set_yscale("symlog", linthresh=1, linscale=0.5)  # few layers drop ten times what most do
    every[0].set_yticks([0, 1, 3, 10], ["0", "1", "3", "10"])
    every[0].set_ylim(values[[*KINDS]].min(axis=None) - 0.2, 2 * values[[*KINDS]].max(axis=None))
    figure.supylabel("cross-token / token-local", fontsize="medium")
    figure.legend(*every[0].get_legend_handles_labels(), loc="outside right center", fontsize=6)
    medians = values.groupby("column").operator.median()
    dropped = f"what FACTS drops of the Fisher is {span(medians)} times what it keeps"
    return figure, f"Over all pairs of tokens, {dropped}, in the median layer"


def _draw_maps(every: list[Axes], experiment: Experiment, values: pd.DataFrame) -> None:
    """Draw the columns' maps on one logarithmic scale: a few tokens can outweigh all others; no coupling is white."""
    known = values.coupling[values.coupling > 0]
    norm = LogNorm(*np.quantile(known, COLOURED)) if len(known) else None
    for axes, column in zip(every, experiment.columns, strict=True):
        own = values[(values.column == column) & values.coupling.notna()]
        axes.set(title=column, xlabel="token index", ylabel="token index")
        axes.grid(visible=False)
        if own.empty:
            placeholder(axes)
            continue
        axes.set_title("\n".join([column, *dict.fromkeys(own.layer.dropna())]), fontsize=7)
        upper = own.pivot(index="token", columns="other", values="coupling").to_numpy(float)
        coupling = np.triu(upper) + np.triu(upper, 1).T
        image = axes.imshow(np.ma.masked_equal(coupling, 0), cmap="cividis", norm=norm)
    if norm:
        ends: dict[str, Any] = {"extend": "both", "location": "bottom", "shrink": 0.6, "aspect": 40, "pad": 0.02}
        bar = every[0].figure.colorbar(image, ax=every, **ends)
        bar.set_label("coupling / mean diagonal" + "; white: none" * bool((values.coupling == 0).any()), fontsize=7)
        bar.ax.xaxis.set_minor_formatter(NullFormatter())


def _draw_tokens(every: list[Axes], experiment: Experiment, values: pd.DataFrame) -> None:
    """Draw the columns' distance correlations by token, on one scale."""
    for axes, column in zip(every, experiment.columns, strict=True):
        tokens = values[(values.column == column) & values.coupling.isna()]
        axes.set(xlabel="token index")
        if axes is not every[0]:
            axes.sharey(every[0])
            axes.label_outer()
        if tokens.empty:
            placeholder(axes)
            continue
        sure, mean = tokens.p_value < SIGNIFICANT, tokens.distance_correlation.mean()
        for part, color in ((sure, BLUE), (~sure, GREY)):
            axes.plot(tokens.token[part], tokens.distance_correlation[part], "x", color=color)
        axes.axhline(mean, color=BLACK, linestyle="--")
        axes.set_title(f"mean {mean:.2f}" + f"; grey: p ≥ {SIGNIFICANT}" * (not sure.all()), fontsize=7)
    every[0].set_ylabel("distance correlation²\nof inputs and gradients")
    every[0].set_ylim(bottom=min(0, every[0].get_ylim()[0]))


def _draw_similarity(axes: Axes, points: pd.DataFrame) -> None:
    axes.set(xlabel="cosine to the empirical Fisher", ylabel="Top-1 [%]")
    axes.margins(x=0.2, y=0.1)
    if points.empty:
        return placeholder(axes)
    errors = {"xerr": points.cosine_error, "yerr": points.standard_error}
    axes.errorbar(points.cosine, points.top1, **errors, fmt="o", color=VERMILION, elinewidth=0.6)
    middle = (points.cosine.min() + points.cosine.max()) / 2
    for point in points.itertuples():
        others = points.drop(point.Index)
        beside = others.top1[(others.cosine - point.cosine).abs().nsmallest(1).index]
        up = 3 if (point.top1 >= beside).all() else -8  # labels point inwards, so that none crosses the frame
        shift, side = ((4, up), "left") if point.cosine < middle else ((-4, up), "right")
        place: dict[str, Any] = {"xytext": shift, "textcoords": "offset points", "ha": side, "fontsize": 6}
        axes.annotate(point.estimator, (point.cosine, point.top1), **place)


INTERPOLATED_LAYERS = ("blocks.1.attn.proj", "blocks.1.attn.qkv")


def interpolation_values(experiment: Experiment, records: Records) -> pd.DataFrame:
    """List the measured errors of two layers, their interpolation by windows, and one cubic spline through them."""
    (record,) = records.values()
    profile = record.summary.profile if record and record.summary else {}
    curves = []
    for layer in INTERPOLATED_LAYERS if profile else ():
        ranks, ratios, errors = np.array(profile[layer]).T
        candidates = candidate_ranks(int(ranks[0]), int(ranks[-1]), 8, at_least=len(ratios))
        offered = np.array(candidates) / round(ranks[-1] / ratios[-1])
        fine = np.linspace(ratios[0], ratios[-1], 161)
        drawn = {
            "windows (CoRS)": (offered, interpolate_profile(ratios, errors, offered)),
            "global cubic": (fine, interpolate_profile(ratios, errors, fine, "cubic")),
            "measured": (ratios, errors),
        }
        for name, (x, y) in drawn.items():
            curves.append(pd.DataFrame({"layer": layer, "curve": name, "ratio": x, "error": y}))
    return joined(curves, ["layer", "curve", "ratio", "error"])


def draw_interpolation(experiment: Experiment, values: pd.DataFrame) -> tuple[Figure, str]:
    """Plot the curves of two layers on one scale."""
    figure, every = panels(len(INTERPOLATED_LAYERS), 2.6, sharey=True)
    formats = {
        "windows (CoRS)": ("interpolated in windows, by CoRS", "s", BLUE, 2.5),
        "global cubic": ("one cubic through all points", "-", VERMILION, 0),
        "measured": ("measured", "o", BLACK, 4),
    }
    apart = []
    for axes, layer in zip(every, INTERPOLATED_LAYERS, strict=True):
        axes.set(title=layer, xlabel="remaining ratio")
        axes.axhline(0, color=BLACK, linewidth=0.5)
        curves = dict(iter(values[values.layer == layer].groupby("curve")))
        for name, (label, line, color, size) in formats.items():
            axes.plot(curves[name].ratio, curves[name].error, line, color=color, markersize=size, label=label)
        windows, cubic = curves["windows (CoRS)"], curves["global cubic"]
        apart.append(abs(np.interp(windows.ratio, cubic.ratio, cubic.error) / windows.error - 1).max())
    every[0].set_ylabel("KL divergence [nat]")
    every[0].set_yscale("log" if (values.error > 0).all() else "linear")
    every[-1].legend(loc="upper right", fontsize=6)
    text = "Between measurements, CoRS's interpolation and one cubic through all points differ by up to"
    return figure, f"{text} {100 * max(apart):.0f} % of CoRS's"
