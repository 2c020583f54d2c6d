"""Output of a run: tables, figures and the report, in the results folder, on the screen, and in W&B."""

import copy
import logging
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill
from typing import Any, cast

import matplotlib
import pandas as pd
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from experiments.cell import Cell
from experiments.compose import is_ours
from experiments.config import USER_ERRORS, Experiment, in_a_line, plain
from experiments.grid import every_experiment, verified
from experiments.output.figures import STYLE, Drawing, ablation, ranking, steps, throughput
from experiments.output.layer_figures import cross_moments, motivation, sensitivity_interpolation, token_couplings
from experiments.output.report import write_report
from experiments.output.tables import Entry, entries_of, places_of, screen_table, write_tables
from experiments.output.tracking import tracked
from experiments.record import write_records
from facts.utils.files import replacing

log = logging.getLogger(__name__)
logging.getLogger("fontTools").setLevel(logging.WARNING)  # it reports every glyph it omits from a PDF

OF_ACCURACY = (ablation, ranking, steps, throughput)
OF_LAYERS = (cross_moments, motivation, sensitivity_interpolation, token_couplings)
DRAWINGS: dict[str, Drawing] = {drawing.__name__: drawing for drawing in (*OF_ACCURACY, *OF_LAYERS)}
STAND_INS = {"mini": "; small stand-ins"}  # in titles of a profile, since tables and figures travel alone
CHARACTERS_PER_INCH = 15  # of a title


def show(experiment: Experiment, cells: list[Cell], folder: Path, config: DictConfig, console: Console) -> None:
    """Write and print the experiment's table, draw the figure of its first draw, and log both to W&B."""
    settings, profile = plain(experiment), config.profile.name
    experiment = copy.deepcopy(experiment)
    experiment.title += STAND_INS.get(profile, "")
    if not is_ours(experiment.name):  # the report reads it here
        with replacing(folder / "tables" / f"{experiment.name}.yaml") as path:
            OmegaConf.save(OmegaConf.create(settings), path)
    about = {"name": f"{experiment.name} · {profile}", "tags": [experiment.name, profile]}
    about["group"] = config.tracking.group or experiment.name
    settings = {"profile": profile, "experiment": settings}
    with tracked(config.tracking, folder, f"result-{profile}-{experiment.name}", config=settings, **about) as track:
        figure, entries = None, list[Entry]()
        if experiment.metrics:
            entries = entries_of(experiment, cells, config.profile.comparable)
            write_tables(experiment, entries, folder / "tables")
            records = [cell.record for cell in cells if cell.record]
            write_records(records, folder / "tables" / f"{experiment.name}.jsonl")
            console.print(screen_table(experiment, entries))
        if experiment.figure:
            figure = draw_figure(experiment, [cell for cell in cells if not cell.draw], folder / "figures")
        track(lambda run: log_results(run, figure, entries))


def draw_figure(experiment: Experiment, cells: Iterable[Cell], folder: Path) -> Path:
    """Draw the experiment's figure and return the PNG's path; missing measurements are marked in the figure."""
    measured = {(cell.row, cell.column): cell.record for cell in cells}
    records = {place: measured.get(place) for place in places_of(experiment)}
    with matplotlib.rc_context(STYLE):
        figure, values = DRAWINGS[experiment.figure](experiment, records)
        figure.suptitle(fill(experiment.title, round(CHARACTERS_PER_INCH * figure.get_figwidth())), fontsize=9)
        for suffix in ("pdf", "png"):
            with replacing(folder / f"{experiment.name}.{suffix}") as path:
                figure.savefig(path, format=suffix, dpi=200)
    with replacing(folder / f"{experiment.name}.csv") as path:
        values.to_csv(path, index=False)
    return folder / f"{experiment.name}.png"


def report_on_all(folder: Path) -> None:
    """Write the report on every experiment from the files in `folder`, those of your own among them."""
    experiments = every_experiment()
    known = {experiment.name for experiment in experiments}
    for path in sorted((folder / "tables").glob("*.yaml")):
        if path.stem not in known:
            try:
                experiment = cast(Experiment, OmegaConf.merge(Experiment, OmegaConf.load(path)))
                experiments.append(verified(experiment, path.stem))
            except USER_ERRORS as error:
                log.warning("%s is left out: %s", path, in_a_line(error))
    write_report(experiments, folder)


def log_results(run: Any, figure: Path | None, entries: list[Entry]) -> None:
    import wandb

    if figure:
        run.log({"figure": wandb.Image(str(figure))})
    if entries:
        run.log({"table": wandb.Table(dataframe=pd.DataFrame(entries))})
