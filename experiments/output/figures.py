"""Figures of an experiment, drawn from the records of its cells: PDF, PNG, and the plotted values as CSV."""

import logging
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill

import matplotlib

from experiments.config import Experiment
from experiments.grid import GridCell
from experiments.output.plots.ablation import ablation
from experiments.output.plots.coupling import motivation, token_couplings
from experiments.output.plots.cross_moments import cross_moments
from experiments.output.plots.forms import forms
from experiments.output.plots.ranking import ranking
from experiments.output.plots.sensitivity import fisher_prediction, sensitivity_interpolation
from experiments.output.plots.steps import steps
from experiments.output.plots.style import STYLE, Drawing
from experiments.output.plots.throughput import throughput
from facts.utils.files import replacing

logging.getLogger("fontTools").setLevel(logging.WARNING)  # it reports every glyph that it leaves out of a PDF

CHARACTERS_PER_INCH = 15  # of a title

DRAWINGS: dict[str, Drawing] = {
    "ablation": ablation,
    "cross_moments": cross_moments,
    "fisher_prediction": fisher_prediction,
    "forms": forms,
    "motivation": motivation,
    "ranking": ranking,
    "sensitivity_interpolation": sensitivity_interpolation,
    "steps": steps,
    "throughput": throughput,
    "token_couplings": token_couplings,
}


def draw_figure(experiment: Experiment, grid: Iterable[GridCell], folder: Path) -> Path:
    """Draw the experiment's figure and return the path of the PNG; missing measurements are noted in their place."""
    records = {(cell.row, cell.column): cell.record for cell in grid}
    with matplotlib.rc_context(STYLE):
        figure, values = DRAWINGS[experiment.figure](experiment, records)
        figure.suptitle(fill(experiment.title, round(CHARACTERS_PER_INCH * figure.get_figwidth())), fontsize=9)
        for suffix in ("pdf", "png"):
            with replacing(folder / f"{experiment.name}.{suffix}") as path:
                figure.savefig(path, format=suffix, dpi=200)
    with replacing(folder / f"{experiment.name}.csv") as path:
        values.to_csv(path, index=False)
    return folder / f"{experiment.name}.png"
