"""Figures of an experiment, drawn from the records of its cells: PDF, PNG, and the plotted values as CSV."""

import logging
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill
from typing import Protocol

import matplotlib

from experiments.config import Experiment
from experiments.drawings.ablation import ablation
from experiments.drawings.coupling import motivation, token_couplings
from experiments.drawings.cross_moments import cross_moments
from experiments.drawings.sensitivity import fisher_prediction, sensitivity_interpolation
from experiments.drawings.style import STYLE, Drawing
from experiments.drawings.throughput import throughput
from experiments.record import Record
from facts.files import replacing

logging.getLogger("fontTools").setLevel(logging.WARNING)  # it reports every glyph that it leaves out of a PDF

CHARACTERS_PER_INCH = 15  # of a title

DRAWINGS: dict[str, Drawing] = {
    "ablation": ablation,
    "cross_moments": cross_moments,
    "fisher_prediction": fisher_prediction,
    "motivation": motivation,
    "sensitivity_interpolation": sensitivity_interpolation,
    "throughput": throughput,
    "token_couplings": token_couplings,
}


class Place(Protocol):
    """A cell's place in an experiment, with its record once it is done."""

    row: str
    column: str
    record: Record | None


def draw_figure(experiment: Experiment, places: Iterable[Place], folder: Path) -> Path:
    """Draw the experiment's figure and return the PNG's path; what is not measured is said in its place."""
    records = {(place.row, place.column): place.record for place in places}
    with matplotlib.rc_context(STYLE):
        figure, values = DRAWINGS[experiment.figure](experiment, records)
        figure.suptitle(fill(experiment.title, round(CHARACTERS_PER_INCH * figure.get_figwidth())), fontsize=9)
        for suffix in ("pdf", "png"):
            with replacing(folder / f"{experiment.name}.{suffix}") as path:
                figure.savefig(path, format=suffix, dpi=200)
    with replacing(folder / f"{experiment.name}.csv") as path:
        values.to_csv(path, index=False)
    return folder / f"{experiment.name}.png"
