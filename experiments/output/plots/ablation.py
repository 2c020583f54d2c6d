"""Ablations: one choice of a method against accuracy."""

import itertools

import pandas as pd
from matplotlib.figure import Figure

from experiments.config import Experiment
from experiments.output.plots.style import BLUE, GREEN, ORANGE, VERMILION, WIDTH, Records, say


def ablation(experiment: Experiment, records: Records) -> tuple[Figure, pd.DataFrame]:
    """Plot the ranked metric of every row, one curve a column."""
    metric = experiment.ranked_by
    figure = Figure(figsize=(WIDTH / 2, 2.4), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=experiment.axis, ylabel=f"{experiment.metrics[metric]} [%]")
    values = pd.DataFrame(
        [
            (row, column, record.metrics[metric])
            for (row, column), record in records.items()
            if record and metric in record.metrics
        ],
        columns=["row", "column", metric],
    )
    if values.empty:
        say(axes)
    formats = itertools.cycle((("o-", BLUE), ("^-", VERMILION), ("s-", GREEN), ("D-", ORANGE)))
    for column, (line, color) in zip(experiment.columns, formats, strict=False):
        own = values[values.column == column].set_index("row")[metric].reindex(experiment.rows)
        axes.plot(range(len(own)), own, line, color=color, markersize=3, linewidth=0.9, label=column)
    axes.set_xticks(range(len(experiment.rows)), experiment.rows)
    axes.margins(x=0.08)
    axes.legend()
    return figure, values
