"""Ratio of the dropped cross-token terms to the kept ones, layer by layer."""

import pandas as pd
from matplotlib.figure import Figure

from experiments.config import Experiment
from experiments.output.plots.style import BLACK, BLUE, GREEN, ORANGE, VERMILION, WIDTH, Records, joined, say

COLUMNS = ["column", "layer", "operator", "operator_error", "input_side", "grad_side", "loss"]
KINDS = {
    "operator": ("Fisher", "o", BLUE),
    "input_side": ("E[DᵀD]", "^", VERMILION),
    "grad_side": ("E[DDᵀ]", "s", GREEN),
    "loss": ("loss of the truncation", "x", ORANGE),
}


def cross_moments(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot the ratio of the cross-token to the token-local part over the layers in order, one panel a network."""
    (row,) = experiment.rows
    num_rows = 1 + (len(experiment.columns) > 2)
    figure = Figure(figsize=(WIDTH, 0.8 + 1.8 * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, -(-len(experiment.columns) // num_rows), squeeze=False).flatten()
    found = []
    for axes, column in zip(panels, experiment.columns, strict=False):
        axes.set(title=column, xlabel="layer, in order", ylabel="cross-token / token-local")
        record = records[row, column]
        if not (record and record.analysis):
            say(axes)
            continue
        layers = pd.DataFrame.from_dict(record.analysis, orient="index").rename_axis("layer").reset_index()
        for kind, (label, marker, color) in KINDS.items():
            if kind in layers:
                axes.plot(layers.index, layers[kind], marker, color=color, markersize=3, label=label)
        axes.axhline(0, color=BLACK, linewidth=0.5)
        found.append(layers.assign(column=column).reindex(columns=COLUMNS))
    for axes in panels[len(experiment.columns) :]:
        axes.set_visible(False)
    legend = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if legend:
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=len(KINDS))
    return figure, joined(found, COLUMNS)
