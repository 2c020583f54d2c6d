"""Sensitivities of layers: measured, interpolated, predicted."""

import numpy as np
import pandas as pd
import scipy
from matplotlib.figure import Figure

from experiments.config import Experiment
from experiments.output.plots.colors import BLACK, BLUE, VERMILION
from experiments.output.plots.style import Records, joined, panels, say
from experiments.record import Record
from facts.cost.ranks import candidate_ranks
from facts.search import interpolate_profile

INTERPOLATED_LAYERS = ("blocks.1.attn.proj", "blocks.1.attn.qkv")


def sensitivity_interpolation(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot measured errors of two layers, their interpolation by windows, and one cubic spline through them."""
    (record,) = records.values()
    figure, every = panels(len(INTERPOLATED_LAYERS), 2.6)
    curves = []
    for axes, layer in zip(every, INTERPOLATED_LAYERS, strict=True):
        axes.set(title=layer, xlabel="ratio that remains", ylabel="KL divergence [nat]")
        measured = np.array(record.profile[layer]) if record and record.profile else np.empty((0, 3))
        if not len(measured):
            say(axes)
            continue
        ranks, ratios, errors = measured.T
        candidates = candidate_ranks(int(ranks[0]), int(ranks[-1]), 8, at_least=len(ratios))
        offered = np.array(candidates) / round(ranks[-1] / ratios[-1])
        fine = np.linspace(ratios[0], ratios[-1], 161)
        drawn = {
            "windows (CoRS)": (offered, interpolate_profile(ratios, errors, offered)),
            "global cubic": (fine, interpolate_profile(ratios, errors, fine, "cubic")),
            "measured": (ratios, errors),
        }
        formats = (("s--", BLUE, 2.5), ("-", VERMILION, 0), ("o", BLACK, 4))
        for (name, (x, y)), (line, color, size) in zip(drawn.items(), formats, strict=True):
            axes.plot(x, y, line, color=color, markersize=size, label=name)
            curves.append(pd.DataFrame({"layer": layer, "curve": name, "ratio": x, "error": y}))
        axes.axhline(0, color=BLACK, linewidth=0.5)
        axes.legend()
    return figure, joined(curves, ["layer", "curve", "ratio", "error"])


def fisher_prediction(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot errors predicted to second order against measured ones, one point per layer and ratio."""
    truth, *predictions = experiment.rows
    figure, every = panels(len(experiment.columns), 3.2)
    points = []
    for axes, column in zip(every, experiment.columns, strict=True):
        axes.set(title=column, xscale="log", yscale="log")
        axes.set(xlabel="measured KL divergence [nat]", ylabel="predicted [nat]")
        measured = _errors(records[truth, column])
        for prediction, color, marker in zip(predictions, (VERMILION, BLUE), "^o", strict=True):
            both = measured.merge(_errors(records[prediction, column]), on=["layer", "rank"])
            both = both[(both.error_x > 0) & (both.error_y > 0)]
            if both.empty:
                say(axes)
                continue
            label = f"{prediction} (rank correlation {scipy.stats.spearmanr(both.error_x, both.error_y).statistic:.2f})"
            axes.plot(both.error_x, both.error_y, marker, color=color, markersize=2.5, alpha=0.6, label=label)
            columns = {"error_x": "measured", "error_y": "predicted"}
            points.append(both.rename(columns=columns).assign(column=column, prediction=prediction))
        if points:
            ends = [min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])]
            axes.plot(ends, ends, color=BLACK, linewidth=0.7)
            axes.legend(loc="upper left")
    return figure, joined(points, ["column", "prediction", "layer", "rank", "measured", "predicted"])


def _errors(record: Record | None) -> pd.DataFrame:
    entries = record.profile.items() if record else ()
    rows = [(layer, rank, error) for layer, profile in entries for rank, _, error in profile]
    return pd.DataFrame(rows, columns=["layer", "rank", "error"])
