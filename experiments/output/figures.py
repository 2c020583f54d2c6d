"""Figures of an experiment, drawn from the records of its cells: PDF, PNG, and the plotted values as CSV."""

import logging
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill

import matplotlib

from experiments.config import Experiment
from experiments.grid import GridCell
from experiments.output.plots.accuracy import ablation, forms, steps
from experiments.output.plots.couplings import cross_moments, motivation, token_couplings
from experiments.output.plots.ranking import ranking
from experiments.output.plots.sensitivity import fisher_prediction, sensitivity_interpolation
from experiments.output.plots.style import STYLE, Drawing
from experiments.output.plots.throughput import throughput
from facts.utils.files import replacing

logging.getLogger("fontTools").setLevel(logging.WARNING)  # it reports every glyph it omits from a PDF

CHARACTERS_PER_INCH = 15  # of a title

OF_ACCURACY = (ablation, forms, ranking, steps, throughput)
OF_LAYERS = (cross_moments, fisher_prediction, motivation, sensitivity_interpolation, token_couplings)
DRAWINGS: dict[str, Drawing] = {drawing.__name__: drawing for drawing in (*OF_ACCURACY, *OF_LAYERS)}


def draw_figure(experiment: Experiment, grid: Iterable[GridCell], folder: Path) -> Path:
    """Draw the experiment's figure and return the PNG's path; missing measurements are marked in the figure."""
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
