"""Output of a run: tables, figures and the report, in the results folder, on the screen, and as W&B artifacts."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig
from rich.console import Console

from experiments.composition import composed
from experiments.config import Experiment
from experiments.grid import GridCell, every_experiment
from experiments.output.artifact import publish
from experiments.output.devices import kept_records, rows_of_other_devices
from experiments.output.figures import draw_figure
from experiments.output.report.page import write_report
from experiments.output.tables import Entry, entries_of, screen_table, write_tables
from experiments.output.tracking import tracked
from experiments.record import Record, write_records
from facts.utils.cache import content_key
from facts.utils.files import replacing


def show(experiment: Experiment, grid: list[GridCell], folder: Path, config: DictConfig, console: Console) -> None:
    """Draw the figure of the experiment's first draw, write and print its table, and log all files to W&B."""
    if experiment.by_device:
        grid = grid + rows_of_other_devices(experiment, grid, folder)
    first = [cell for cell in grid if not cell.draw]
    with tracked(config.tracking, folder, f"result-{experiment.name}", group=experiment.name) as track:
        if experiment.figure:
            path = draw_figure(experiment, first, folder / "figures")
            track(lambda run: log_figure(run, path))
        if experiment.metrics:
            entries = entries_of(experiment, grid, config.profile.comparable)
            write_tables(experiment, entries, folder / "tables", properties_of(experiment, grid))
            records = [cell.record for cell in grid if cell.record]
            if experiment.by_device:
                records = kept_records(experiment, grid, folder)
            write_records(records, folder / "tables" / f"{experiment.name}.jsonl")
            console.print(screen_table(experiment, entries))
            track(lambda run: log_table(run, entries, first))
        track(lambda run: publish(run, experiment, first, folder))


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


def log_figure(run: Any, path: Path) -> None:
    import wandb

    run.log({"figure": wandb.Image(str(path))})


def log_table(run: Any, entries: list[Entry], grid: list[GridCell]) -> None:
    """Log the long table, each value with a link to the run of its cell."""
    import wandb

    records = {(cell.row, cell.column): cell.record for cell in grid}
    runs = [link_of(records.get((entry.row, entry.column)), run) for entry in entries]
    run.log({"table": wandb.Table(dataframe=pd.DataFrame(entries).assign(run=runs))})


def link_of(record: Record | None, run: Any) -> str:
    """Link to a record's W&B run, or give only its id if `run` is offline; empty if the record was made without W&B."""
    if record is None or record.config["tracking"]["mode"] == "disabled":
        return ""
    return record.run_id if run.offline else f"{run.project_url}/runs/{record.run_id}"
