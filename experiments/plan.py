"""Remaining work (`experiments.reproduce plan=true`), each cell's state and needs; and what a sweep has done."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import lru_cache
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from experiments.cell import Cell, results_folder
from experiments.config import USER_ERRORS, Experiment, as_json, composed, in_a_line, instantiate, plain
from experiments.grid import GridCell, by_data
from experiments.record import Record, published_records, read_records
from facts.cost.count import count_params, meta_input
from facts.cost.probe import Probe
from facts.modules.networks import frozen, hooked, run
from facts.moments.collect import MemoryPolicy
from facts.parts.layers import select_layers
from facts.tasks.base import Task

BYTES = 4  # per value in float32, the type of stored moments and decompositions
OPEN = ("to do", "failed", "weights not here")
NETWORK = ("profile", "model", "task")
METHOD = ("estimator", "search", "pruning", "finetuning", "stages", "analysis")


def show_plan(experiments: Iterable[Experiment], grid: list[GridCell], config: DictConfig, console: Console) -> None:
    """Show the state of every cell, and what the open ones need."""
    folder, tables = results_folder(config), {experiment.name: experiment for experiment in experiments}
    records = latest_records(folder / "records")
    states = {id(cell): state_of(cell.config, records) if cell.config else cell.status for cell in grid}
    left = [cell for cell in grid if states[id(cell)] in OPEN]
    for name, experiment in tables.items():
        own = [cell for cell in grid if cell.experiment == name]
        own.sort(key=lambda cell: states[id(cell)] != "done")  # if any of several draws is not done, it is shown
        shown = {(cell.row, cell.column): states[id(cell)] for cell in own}
        table = Table("", *experiment.columns, title=experiment.title)
        for row in experiment.rows:
            table.add_row(row, *(shown[row, column] for column in experiment.columns))
        console.print(table)
    times = times_of(folder, tables)
    table = Table("", "cells", "time", "memory on the device", "disk", title="Needs of the open cells, nothing cached")
    table.caption = "Times are sums of medians of earlier cells with the same network and method, or, if nothing is "
    table.caption += "trained, with the same network. docs/reproducing.md has estimates for one A100."
    parts = {name: [cell for cell in left if cell.experiment == name] for name in tables} | {"together": left}
    for name, cells in parts.items():
        if cells:
            columns = ([cell.known_config for cell in column] for column in by_data(cells))
            memory, disk = needs_of(columns)
            table.add_row(name, str(len(cells)), time_of(cells, times), decimal(memory), decimal(disk))
    if num_blocked := [*states.values()].count("blocked"):
        console.print(f"{num_blocked:,} cells are blocked: python -m experiments.doctor says why.")
    if left or not num_blocked:
        console.print(table if left else "Nothing is left to do.")


def show_sweep(overrides: list[str], console: Console) -> None:
    """Print the runs of a sweep by what varies, each with its metrics, and the folder of their records."""
    jobs = sweep_of(overrides)
    known = {folder: latest_records(folder) for folder in dict.fromkeys(cell.records for cell in jobs.values())}
    records = [recorded(cell, known[cell.records]) for cell in jobs.values()]
    metrics = dict.fromkeys(chain.from_iterable(record.metrics for record in records if record))
    table = Table("", *metrics, title=f"{len(jobs)} runs")
    for job, record in zip(jobs, records, strict=True):
        own = [override for override in job if not all(override in other for other in jobs)]
        values = {metric: f"{value:.4g}" for metric, value in (record.metrics if record else {}).items()}
        table.add_row(" ".join(own), *(values.get(metric, "") for metric in metrics))
    console.print(table)
    console.print(f"Records: {', '.join(map(str, known))}")


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


def choices(config: Mapping[Any, Any], groups: Iterable[str]) -> tuple[str, ...]:
    """The targets or names that a configuration chooses in these groups, empty for a group without a choice."""
    nodes = [(group, config.get(group)) for group in groups]
    return tuple((node.get("_target_") or node.get("name") or group) if node else "" for group, node in nodes)


def times_of(folder: Path, experiments: Iterable[str]) -> dict[tuple[str, ...], list[float]]:
    """Collect seconds of cells by network and method, and by network only, from our own and published records."""
    times = defaultdict(list)
    for record in chain(read_records(folder / "records"), *(published_records(name, folder) for name in experiments)):
        for groups in (NETWORK + METHOD, NETWORK) if record.status == "done" else ():
            times[choices(record.config, groups)].append(sum(record.seconds.values()))
    return times


def time_of(cells: list[GridCell], times: dict[tuple[str, ...], list[float]]) -> str:
    """Describe the time that cells take one after another."""
    seconds = [median(earlier) for cell in cells if (earlier := seconds_of(cell.known_config, times))]
    text = str(timedelta(seconds=round(sum(seconds)))) if seconds else "unknown"
    return text if len(seconds) in (0, len(cells)) else f"{text} for {len(seconds)} of them"


def seconds_of(config: DictConfig, times: dict[tuple[str, ...], list[float]]) -> list[float]:
    """Find earlier times with the same network and method; if nothing is trained, otherwise with the same network."""
    trains = any(config.get(group) for group in ("finetuning", "stages", "pruning"))
    return times.get(choices(config, NETWORK + METHOD)) or ([] if trains else times.get(choices(config, NETWORK), []))


def needs_of(columns: Iterable[list[DictConfig]]) -> tuple[int, int]:
    """Count the bytes that columns need on the device and on disk, without loading weights or images."""
    on_device, on_disk = zip((0, 0), *map(_needs_of, columns), strict=True)
    return max(on_device), sum(on_disk)


def _needs_of(configs: list[DictConfig]) -> tuple[int, int]:
    first, profile = configs[0], configs[0].profile.name
    task, memory = instantiate(first.task[profile]), MemoryPolicy(**first.hardware.memory)
    layers, num_params, kept = sizes_of(as_json(first.model[profile]), task, memory, tuple(first.excluded_names))
    low_rank = [(instantiate(config.estimator), config.cache) for config in configs if config.estimator["_target_"]]
    cached = {estimator for estimator, cache in low_rank if cache}
    saved = {moment for estimator in cached for moment in estimator.moments if moment.is_kept}
    held = {moment for estimator, _ in low_rank for moment in estimator.moments}
    most = max(sum(moment.num_held(*layer) for layer in group for moment in held) for group in memory.groups(layers))
    decomposition = sum(min(layer) * (sum(layer) + 1) for layer in layers)
    saved_values = sum(moment.num_values(*layer) for layer in layers for moment in saved) + len(cached) * decomposition
    device = BYTES * (num_params + most) + task.batch_size * kept
    return device, BYTES * saved_values


@lru_cache
def sizes_of(
    recipe: str, task: Task, memory: MemoryPolicy, excluded_names: tuple[str, ...]
) -> tuple[list[tuple[int, int]], int, int]:
    """Measure the network of a JSON recipe: `(d_in, d_out)` of its layers, parameters, bytes kept per sample."""
    with torch.device("meta"):
        model = instantiate(OmegaConf.merge(OmegaConf.create(recipe), {"weights": "random"})).build()
    example = meta_input(model, task.input_shape(model))
    selection = select_layers(model, excluded_names=excluded_names, probe=Probe.of(model, example=example))
    layers = list(selection.layers.values())
    blocks = memory.blocks(selection.model, layers)
    shapes = [(layer.in_features, layer.out_features) for layer in layers]
    return shapes, count_params(model), kept_bytes(selection.model, layers, example, blocks)


def kept_bytes(model: nn.Module, layers: Iterable[nn.Linear], inputs: Tensor, blocks: Iterable[nn.Module] = ()) -> int:
    """Bytes that a data pass keeps for these inputs; checkpointed `blocks` keep arguments, the largest keeps all."""
    kept: list[dict[int, torch.UntypedStorage]] = []  # outside blocks, then within each
    current: list[int] = [0]

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[current[-1]][storage._cdata] = storage
        return tensor

    def enter(block: nn.Module, *arguments: Any) -> None:
        tree_map_only(Tensor, keep, arguments)
        current.append(len(kept))
        kept.append({})

    def leave(*_: Any) -> None:
        current.pop()

    def bytes_of(inputs: Tensor) -> int:
        kept[:] = [{}]
        tree_map_only(Tensor, keep, run(model, inputs))
        outside, *within = (sum(storage.nbytes() for storage in storages.values()) for storages in kept)
        return outside + max(within, default=0)

    blocks = list(blocks)
    in_blocks = hooked(after=[(block, leave) for block in blocks], before=[(block, enter) for block in blocks])
    with in_blocks, frozen(model), saved_tensors_hooks(keep, lambda tensor: tensor):
        for layer in layers:
            layer.weight.requires_grad_(True)  # so that autograd keeps the inputs
        return bytes_of(torch.cat([inputs] * 2)) - bytes_of(inputs)  # subtracts the weights, which autograd keeps too
