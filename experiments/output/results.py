"""Output of a run: tables, figures and the report, in the results folder, on the screen, and in W&B."""

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any, cast

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape

from experiments.cell import Cell
from experiments.compose import is_ours
from experiments.config import USER_ERRORS, Experiment, in_a_line, plain
from experiments.grid import every_experiment, verified
from experiments.output import figures, layer_figures, speed_figures
from experiments.output.entries import Entry, entries_of, places_of
from experiments.output.figures import STYLE, Drawing, panels, placeholder
from experiments.output.report import STAND_INS, read_result, write_report
from experiments.output.tables import SCREEN, screen_tables, write_tables
from experiments.output.tracking import tracked
from experiments.record import Record, write_records
from facts.utils.files import replacing

log = logging.getLogger(__name__)
logging.getLogger("fontTools").setLevel(logging.WARNING)  # it reports every glyph it omits from a PDF

DRAWINGS = {
    "ablation": Drawing(figures.ablation_values, figures.draw_ablation),
    "cross_moments": Drawing(layer_figures.cross_values, layer_figures.draw_cross_moments),
    "motivation": Drawing(layer_figures.motivation_values, layer_figures.draw_motivation),
    "ranking": Drawing(speed_figures.ranking_values, speed_figures.draw_ranking),
    "sensitivity_interpolation": Drawing(layer_figures.interpolation_values, layer_figures.draw_interpolation),
    "steps": Drawing(figures.steps_values, figures.draw_steps),
    "throughput": Drawing(speed_figures.throughput_values, speed_figures.draw_throughput),
    "trade_off": Drawing(speed_figures.trade_off_values, speed_figures.draw_trade_off),
    "token_couplings": Drawing(layer_figures.coupling_values, layer_figures.draw_couplings),
}
UNDATED: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "png": {}}  # the same file for the same values
CHARACTERS_PER_INCH = 12, 18  # of a title and a caption


def show(experiment: Experiment, cells: list[Cell], folder: Path, config: DictConfig, console: Console) -> None:
    """Write and print the experiment's table, draw the figure of its first draw, and log both to W&B."""
    settings, profile = plain(experiment), config.profile.name
    experiment = titled(experiment, profile)
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
            console.print(f"\n{escape(experiment.title)}", width=SCREEN)
            for table in screen_tables(experiment, entries):
                console.print(table, width=SCREEN)
        if experiment.figure:
            first = {(cell.row, cell.column): cell.record for cell in cells if not cell.draw}
            figure = draw_figure(experiment, values_of(experiment, first), folder / "figures")
        track(lambda run: log_results(run, figure, entries))


def values_of(experiment: Experiment, records: Mapping[tuple[str, str], Record | None]) -> pd.DataFrame:
    """List the values of the experiment's figure; missing records are marked in it."""
    places = {place: records.get(place) for place in places_of(experiment)}
    return DRAWINGS[experiment.figure].values(experiment, places)


def drawn(experiment: Experiment, values: pd.DataFrame) -> tuple[Figure, str]:
    """Draw the experiment's figure, with a message on what it shows; or that nothing was measured.

    Networks have the profile's names.
    """
    if not values.empty:
        experiment, names = copy.deepcopy(experiment), experiment.column_titles
        experiment.columns = {names.get(column, column): own for column, own in experiment.columns.items()}
        if "column" in values:
            values = values.assign(column=values.column.replace(names))
        return DRAWINGS[experiment.figure].draw(experiment, values)
    figure, (axes,) = panels(1, 2)
    placeholder(axes)
    return figure, ""


def draw_figure(experiment: Experiment, values: pd.DataFrame, folder: Path) -> Path:
    """Draw the experiment's figure, under what it shows, and return the PNG's path."""
    with matplotlib.rc_context(STYLE):
        figure, message = drawn(experiment, values)
        title, caption = (
            fill(
                text.replace(" %", "\N{NO-BREAK SPACE}%"),
                round(per_inch * figure.get_figwidth()),
                break_on_hyphens=False,
            )
            for text, per_inch in zip((message, experiment.title), CHARACTERS_PER_INCH, strict=True)
        )
        figure.suptitle(title, fontsize=9, weight="bold")
        figure.supxlabel(caption, fontsize=7)
        for suffix in ("pdf", "png"):
            with replacing(folder / f"{experiment.name}.{suffix}") as path:
                figure.savefig(path, format=suffix, dpi=200, metadata=UNDATED[suffix] | {"Title": message})
    with replacing(folder / f"{experiment.name}.csv") as path:
        values.to_csv(path, index=False, float_format="%.10g")  # processors add up in other orders
    return folder / f"{experiment.name}.png"


def titled(experiment: Experiment, profile: str) -> Experiment:
    """Copy an experiment with a title that names the profile."""
    experiment = copy.deepcopy(experiment)
    experiment.title += STAND_INS.get(profile, "") * (
        not any(name in experiment.title for name in experiment.column_titles.values())
    )
    return experiment


def draw_again(folder: Path) -> None:
    """Draw the tables and figures of `folder` again: those of analyses, which published records lack, from a CSV."""
    for experiment in experiments_in(folder):
        experiment = titled(experiment, folder.name)
        result, path = read_result(experiment, folder), folder / "figures" / f"{experiment.name}.csv"
        if experiment.metrics and result.has_begun:
            write_tables(result.experiment, [*result.entries.values()], folder / "tables")
        if experiment.figure and path.exists():
            values = values_of(experiment, result.records)
            values = pd.read_csv(path) if values.empty else values
            draw_figure(experiment, values, folder / "figures")


def report_on_all(folder: Path) -> None:
    """Write the report on every experiment from the files in `folder`, those of your own among them."""
    write_report(experiments_in(folder), folder)


def experiments_in(folder: Path) -> list[Experiment]:
    """Every experiment, and those of your own whose tables are in `folder`."""
    experiments = every_experiment()
    known = {experiment.name for experiment in experiments}
    for path in sorted((folder / "tables").glob("*.yaml")):
        if path.stem not in known:
            try:
                experiment = cast(Experiment, OmegaConf.merge(Experiment, OmegaConf.load(path)))
                experiments.append(verified(experiment, path.stem))
            except USER_ERRORS as error:
                log.warning("%s is left out: %s", path, in_a_line(error))
    return experiments


def log_results(run: Any, figure: Path | None, entries: list[Entry]) -> None:
    import wandb

    if figure:
        run.log({"figure": wandb.Image(str(figure))})
    if entries:
        run.log({"table": wandb.Table(dataframe=pd.DataFrame(entries))})
