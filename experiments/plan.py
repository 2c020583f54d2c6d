"""Prints of cells' states: what is left to do (`experiments.reproduce plan=true`), and what a sweep has done."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import timedelta
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.cell import Cell, recall
from experiments.compose import composed
from experiments.config import USER_ERRORS, Experiment, in_a_line
from experiments.output.tables import SCREEN, by_network
from experiments.record import Record, published_records

TIMED = ("profile", "model", "task", "estimator", "search", "pruning", "finetuning", "stages", "analysis")
Choices = tuple[str, ...]


def show_plan(experiments: list[Experiment], tables: list[list[Cell]], folder: Path, console: Console) -> None:
    """Show the state of every cell, and the time that the open ones take."""
    records = recall(chain.from_iterable(tables), folder / "records").values()
    times = times_of(chain(records, *(published_records(experiment.name, folder) for experiment in experiments)))
    needs = Table("", "cells", "time", title="The open cells, with nothing cached")
    needs.caption = "Times are sums of medians of earlier cells with the same network and method. "
    needs.caption += "docs/reproducing.md has estimates for one A100."
    every, blocked = list[Choices](), Counter[str]()
    for experiment, cells in zip(experiments, tables, strict=True):
        # If any of several draws is not done, it is shown.
        states = sorted(((cell, cell.state()) for cell in cells), key=lambda pair: pair[1].name != "done")
        shown = {(cell.row, cell.column): state.name for cell, state in states}
        console.print(escape(experiment.title), width=SCREEN)
        for network, columns in by_network([*experiment.columns]).items():
            table = Table(escape(network.rstrip(", ")), *map(escape, columns))
            for row in experiment.rows:
                table.add_row(escape(row), *(shown.get((row, column), "n.a.") for column in columns.values()))
            console.print(table, width=SCREEN)
        if left := [choices(cell.config) for cell in cells if cell.is_left]:
            needs.add_row(escape(experiment.name), str(len(left)), time_of(left, times))
        every += left
        blocked.update(cell.fault for cell in cells if cell.fault)
    for fault, number in blocked.items():
        console.print(f"{number:,} cells are blocked: {escape(fault)}", soft_wrap=True)
    if every:
        needs.add_row("together", str(len(every)), time_of(every, times))
        console.print(needs, width=SCREEN)
    elif not blocked:
        console.print("Nothing is left to do.")


def choices(config: Mapping[Any, Any]) -> Choices:
    """The targets or names that a configuration chooses in `TIMED`, empty for a group without a choice."""
    nodes = [(group, config.get(group)) for group in TIMED]
    return tuple((node.get("_target_") or node.get("name") or group) if node else "" for group, node in nodes)


def times_of(records: Iterable[Record]) -> dict[Choices, list[float]]:
    """Collect seconds of cells by network and method."""
    times = defaultdict(list)
    for record in records:
        if record.status == "done":
            times[choices(record.config)].append(sum(record.seconds.values()))
    return times


def time_of(cells: list[Choices], times: Mapping[Choices, list[float]]) -> str:
    """Describe the time that cells take one after another."""
    known = [median(times[each]) for each in cells if each in times]
    text = str(timedelta(seconds=round(sum(known)))) if known else "unknown"
    return text if len(known) in (0, len(cells)) else f"{text} for {len(known)} of them"


def sweep_of(jobs: list[tuple[str, ...]]) -> dict[tuple[str, ...], Cell]:
    """Make the cell of each job of a sweep. Raises `ValueError` for a job that cannot run."""
    cells = {}
    for job in jobs:
        try:
            cells[job] = Cell(composed(*job, "hardware.device=cpu"))  # here may be no GPU
            cells[job].check()
        except USER_ERRORS as error:
            raise ValueError(f"{' '.join(job)}: {in_a_line(error)}") from error
    return cells


def show_sweep(jobs: Mapping[tuple[str, ...], Cell], console: Console) -> None:
    """Print the runs of a sweep by what varies, each with its metrics, and the folder of their records."""
    folders = dict.fromkeys(cell.records for cell in jobs.values())
    for folder in folders:
        recall((cell for cell in jobs.values() if cell.records == folder), folder)
    metrics = dict.fromkeys(chain.from_iterable(cell.record.metrics for cell in jobs.values() if cell.record))
    table = Table("", *map(escape, metrics), title=f"{len(jobs)} runs")
    for job, cell in jobs.items():
        own = [override for override in job if not all(override in other for other in jobs)]
        values = {metric: f"{value:.4g}" for metric, value in (cell.record.metrics if cell.record else {}).items()}
        table.add_row(escape(" ".join(own)), *(values.get(metric, "") for metric in metrics))
    console.print(table)
    console.print(f"Records: {', '.join(map(str, folders))}", markup=False)
