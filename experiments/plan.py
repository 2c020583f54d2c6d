"""Remaining work (`experiments.reproduce plan=true`), each cell's state and time; and what a sweep has done."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import lru_cache
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.utils._pytree import tree_map_only

from experiments.cell import Cell, results_folder
from experiments.config import USER_ERRORS, Experiment, as_json, composed, in_a_line, instantiate, plain
from experiments.grid import GridCell, grid_of
from experiments.record import Record, published_records, read_records

OPEN = ("to do", "failed", "weights not here")
TIMED = ("profile", "model", "task", "estimator", "search", "pruning", "finetuning", "stages", "analysis")


def show_plan(experiments: list[Experiment], config: DictConfig, console: Console) -> None:
    """Show the state of every cell, and the time that the open ones take."""
    folder, names = results_folder(config), [experiment.name for experiment in experiments]
    records, times = latest_records(folder / "records"), times_of(folder, names)
    needs = Table("", "cells", "time", title="The open cells, with nothing cached")
    needs.caption = "Times are sums of medians of earlier cells with the same network and method. "
    needs.caption += "docs/reproducing.md has estimates for one A100."
    every, num_blocked = list[GridCell](), 0
    for experiment in experiments:
        found = [(cell, state_of(cell.config, records) if cell.config else cell.status) for cell in grid_of(experiment)]
        found.sort(key=lambda pair: pair[1] != "done")  # if any of several draws is not done, it is shown
        shown = {(cell.row, cell.column): state for cell, state in found}
        table = Table("", *map(escape, experiment.columns), title=escape(experiment.title))
        for row in experiment.rows:
            table.add_row(escape(row), *(shown[row, column] for column in experiment.columns))
        console.print(table)
        if left := [cell for cell, state in found if state in OPEN]:
            needs.add_row(escape(experiment.name), str(len(left)), time_of(left, times))
        every += left
        num_blocked += sum(state == "blocked" for _, state in found)
    if num_blocked:
        console.print(f"{num_blocked:,} cells are blocked: python -m experiments.doctor says why.")
    if every:
        needs.add_row("together", str(len(every)), time_of(every, times))
        console.print(needs)
    elif not num_blocked:
        console.print("Nothing is left to do.")


def show_sweep(overrides: list[str], console: Console) -> None:
    """Print the runs of a sweep by what varies, each with its metrics, and the folder of their records."""
    jobs = sweep_of(overrides)
    known = {folder: latest_records(folder) for folder in dict.fromkeys(cell.records for cell in jobs.values())}
    records = [recorded(cell, known[cell.records]) for cell in jobs.values()]
    metrics = dict.fromkeys(chain.from_iterable(record.metrics for record in records if record))
    table = Table("", *map(escape, metrics), title=f"{len(jobs)} runs")
    for job, record in zip(jobs, records, strict=True):
        own = [override for override in job if not all(override in other for other in jobs)]
        values = {metric: f"{value:.4g}" for metric, value in (record.metrics if record else {}).items()}
        table.add_row(escape(" ".join(own)), *(values.get(metric, "") for metric in metrics))
    console.print(table)
    console.print(f"Records: {', '.join(map(str, known))}", markup=False)


def sweep_of(overrides: list[str]) -> dict[tuple[str, ...], Cell]:
    """Make the cell of each job of a sweep. Raises `ValueError` for a job that cannot run."""
    cells = {}
    for job in jobs_of(overrides):
        try:
            cells[job] = Cell.of(composed(*job, "hardware.device=cpu"))  # here may be no GPU
        except USER_ERRORS as error:
            raise ValueError(f"{' '.join(job)}: {in_a_line(error)}") from error
    return cells


def jobs_of(overrides: list[str]) -> list[tuple[str, ...]]:
    """List the overrides of each job of a sweep. Raises `ValueError` if there are none."""
    choices = (
        [f"{each.get_key_element()}={value}" for value in each.sweep_string_iterator()]
        if each.is_sweep_override()
        else [str(each.input_line)]
        for each in OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(overrides)
    )
    if jobs := list(product(*choices)):
        return jobs
    raise ValueError("the sweep has no runs: a glob matches nothing, or a range is empty")


def state_of(config: DictConfig, records: Mapping[str, Record]) -> str:
    """`done`, `failed`, `to do`, or why it cannot run, by identity and weights; only a run notices changed data."""
    try:
        cell = Cell.of(config)
        if cell.recipe.weights == "pretrained" and cell.recipe.checkpoint() is None:
            return "weights not here"
        record = recorded(cell, records)
    except (OSError, ValueError, ImportError):
        return "blocked"
    return record.status if record else "to do"


def recorded(cell: Cell, records: Mapping[str, Record]) -> Record | None:
    """Find a cell's record among `latest_records`, without its network or data."""
    config = cell.config
    weights = weights_of(as_json(config.model[config.profile.name]))
    return records.get(_key(cell.identity, weights, plain(config)))


def _key(identity: Mapping[str, Any], weights: Mapping[str, str], config: Mapping[str, Any]) -> str:
    """Return what tells records apart without the network and the data; texts do not count, as files may have moved."""
    model, task = (config[group][config["profile"]["name"]] for group in ("model", "task"))
    arguments = tree_map_only(str, lambda _: "", model)
    return json.dumps([identity, weights, arguments, task.get("num_calibration")], sort_keys=True)


@lru_cache
def weights_of(recipe: str) -> dict[str, str]:
    """Provenance of a recipe's weights, cached because hashing a large file takes time."""
    return instantiate(OmegaConf.create(recipe)).provenance()


def latest_records(folder: Path) -> dict[str, Record]:
    """Find the latest record of each cell in a folder."""
    records = sorted(read_records(folder), key=lambda record: record.time)
    return {_key(record.identity, record.weights, record.config): record for record in records}


def choices(config: Mapping[Any, Any]) -> tuple[str, ...]:
    """The targets or names that a configuration chooses in `TIMED`, empty for a group without a choice."""
    nodes = [(group, config.get(group)) for group in TIMED]
    return tuple((node.get("_target_") or node.get("name") or group) if node else "" for group, node in nodes)


def times_of(folder: Path, experiments: Iterable[str]) -> dict[tuple[str, ...], list[float]]:
    """Collect seconds of cells by network and method, from our own and published records."""
    times = defaultdict(list)
    for record in chain(read_records(folder / "records"), *(published_records(name, folder) for name in experiments)):
        if record.status == "done":
            times[choices(record.config)].append(sum(record.seconds.values()))
    return times


def time_of(cells: list[GridCell], times: Mapping[tuple[str, ...], list[float]]) -> str:
    """Describe the time that cells take one after another."""
    seconds = [median(times[key]) for cell in cells if (key := choices(cell.known_config)) in times]
    text = str(timedelta(seconds=round(sum(seconds)))) if seconds else "unknown"
    return text if len(seconds) in (0, len(cells)) else f"{text} for {len(seconds)} of them"
