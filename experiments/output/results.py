"""Output of a run: tables, figures and the report, in the results folder and on the screen."""

import json
from itertools import chain
from pathlib import Path

from rich.console import Console

from experiments.composition import composed
from experiments.config import Experiment
from experiments.grid import GridCell, every_experiment
from experiments.output.devices import kept_records, rows_of_other_devices
from experiments.output.figures import draw_figure
from experiments.output.report.page import write_report
from experiments.output.tables import entries_of, screen_table, write_tables
from experiments.record import write_records
from facts.utils.cache import content_key
from facts.utils.files import replacing


def show(experiment: Experiment, grid: list[GridCell], folder: Path, comparable: bool, console: Console) -> None:
    """Draw the figure of the experiment's first draw, and write and print its table."""
    if experiment.by_device:
        grid = grid + rows_of_other_devices(experiment, grid, folder)
    if experiment.figure:
        draw_figure(experiment, [cell for cell in grid if not cell.draw], folder / "figures")
    if experiment.metrics:
        entries = entries_of(experiment, grid, comparable)
        write_tables(experiment, entries, folder / "tables", properties_of(experiment, grid))
        records = [cell.record for cell in grid if cell.record]
        if experiment.by_device:
            records = kept_records(experiment, grid, folder)
        write_records(records, folder / "tables" / f"{experiment.name}.jsonl")
        console.print(screen_table(experiment, entries))


def update_report(folder: Path, console: Console) -> None:
    """Rewrite the report, unless it already shows the tables and figures in `folder`."""
    shown = chain((folder / "tables").glob("*"), (folder / "figures").glob("*.png"))
    hashes = {str(path.relative_to(folder)): content_key(path.read_bytes()) for path in shown}
    seen = folder / "cache" / "report.json"
    before = json.loads(seen.read_text()) if seen.exists() and (folder / "report.html").exists() else {}
    if changed := {Path(name).stem for name in hashes if hashes[name] != before.get(name)}:
        console.print(f"changed tables and figures: {len(changed)}; rewriting the report")
        report_on_all(folder)
        with replacing(seen) as path:
            path.write_text(json.dumps(hashes))


def report_on_all(folder: Path) -> None:
    """Write the report on every experiment from the files in `folder`."""
    experiments = every_experiment()
    properties = {}
    for experiment in experiments:
        if experiment.properties:
            configs = {row: composed(*overrides) for row, overrides in experiment.rows.items()}
            rows = [GridCell(experiment.name, row, "", config) for row, config in configs.items()]
            properties[experiment.name] = properties_of(experiment, rows)
    write_report(experiments, properties, folder)


def properties_of(experiment: Experiment, grid: list[GridCell]) -> dict[str, dict[str, str]]:
    """Read the properties of each row's estimator, by row and title."""
    words = {True: "yes", False: "no"}
    estimators = {cell.row: estimator for cell in grid if (estimator := cell.estimator)}
    return {
        row: {title: words.get(getattr(estimator, name), "") for name, title in experiment.properties.items()}
        for row, estimator in estimators.items()
    }
