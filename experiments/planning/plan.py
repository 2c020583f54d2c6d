"""Plan of the remaining work, with estimates of time and memory: `reproduce plan=true`."""

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from experiments.cell import Cell, results_folder
from experiments.config import Experiment
from experiments.grid import GridCell, by_data
from experiments.instantiation import as_json, instantiate
from experiments.planning.estimate import Estimate, estimate
from experiments.planning.rates import Rates, measure_rates
from experiments.record import Record, read_records
from experiments.workers import number_of_workers

OPEN = ("to do", "failed", "weights not here")


def show_plan(experiments: list[Experiment], grid: list[GridCell], config: DictConfig, console: Console) -> None:
    """Show the state of every cell, and the estimates for those that are not done."""
    records = latest_records(results_folder(config) / "records")
    states = {id(cell): state_of(cell.config, records) if cell.config else cell.status for cell in grid}
    for experiment in experiments:
        own = [cell for cell in grid if cell.experiment == experiment.name]
        show_cells(experiment.title, {(cell.row, cell.column): states[id(cell)] for cell in own}, console)
    left = [cell for cell in grid if states[id(cell)] in OPEN]
    if not left:
        return
    needs = {
        experiment.name: needs_of(cell for cell in left if cell.experiment == experiment.name)
        for experiment in experiments
    }
    needs["together, with shared data passes"] = together = needs_of(left)
    rates = measure_rates((cell.known_config, need.flops) for cell, need in together)
    show_estimates(needs, rates, number_of_workers(config.workers), console)


def needs_of(cells: Iterable[GridCell]) -> list[tuple[GridCell, Estimate]]:
    """The estimate of each group of cells that share a network and its data, beside the first of them."""
    return [(column[0], estimate([cell.known_config for cell in column])) for column in by_data(list(cells))]


def state_of(config: DictConfig, records: Mapping[str, Record]) -> str:
    """State of a cell without loading or fetching: `done`, `failed`, `to do`, or the reason why it cannot run.

    A record counts if it has the cell's identity and its weights; changed data are noticed only when the cell runs.
    """
    try:
        cell = Cell.of(config)
        if cell.recipe.weights == "pretrained" and cell.recipe.checkpoint() is None:
            return "weights not here"
        record = records.get(_key(cell.identity, weights_of(as_json(config.model[config.profile.name]))))
    except (OSError, ValueError, ImportError) as error:
        return f"blocked ({type(error).__name__})"
    return record.status if record else "to do"


@lru_cache
def weights_of(recipe: str) -> dict[str, str]:
    """The file of a recipe's weights with its hash, computed only once, since files have gigabytes."""
    return instantiate(OmegaConf.create(recipe)).provenance()


def latest_records(folder: Path) -> dict[str, Record]:
    """The records of a folder by identity and weights, the latest of each."""
    records = sorted(read_records(folder), key=lambda record: record.time)
    return {_key(record.identity, record.weights): record for record in records}


def _key(identity: object, weights: object) -> str:
    return json.dumps([identity, weights])


def show_cells(title: str, states: Mapping[tuple[str, str], str], console: Console) -> None:
    """Print the cells of one experiment by row and column."""
    table = Table(title=title)
    columns = dict.fromkeys(column for _, column in states)
    for heading in ("", *columns):
        table.add_column(heading)
    for row in dict.fromkeys(row for row, _ in states):
        table.add_row(row, *(states[row, column] for column in columns))
    console.print(table)


def show_estimates(
    needs: Mapping[str, list[tuple[GridCell, Estimate]]], rates: Rates, workers: int, console: Console
) -> None:
    """Print the estimates of each experiment, one after another with nothing in the cache."""
    table = Table(title="What the cells that are not done will take, with nothing in the cache")
    for heading in ("", "time", "memory on the device", "disk", "checkpoints"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, columns in needs.items():
        estimates = [need for _, need in columns]
        if estimates:
            seconds = sum(need.seconds(rates) for need in estimates)
            weights = {need.recipe: need.parameters for need in estimates}
            memory, disk = max(need.memory for need in estimates), sum(need.disk for need in estimates)
            table.add_row(name, duration(seconds), *map(decimal, (memory, disk, sum(weights.values()))))
    console.print(table)
    if workers > 1:
        console.print(f"On {workers} processes the time is divided by up to {workers}.")


def duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 1.5 else f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
