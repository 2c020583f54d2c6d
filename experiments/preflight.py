"""Preflight: checks before a run starts, of packages, device, checkpoints, data, disk space and tracking."""

import importlib.metadata
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from experiments.cell import results_folder
from experiments.extras import OF_LAUNCHERS, OF_TASKS, TASKS, how_to_install, missing_packages
from experiments.grid import GridCell
from experiments.instantiation import instantiate
from experiments.planning.estimate import Estimate, estimate
from experiments.record import PACKAGES
from experiments.wording import worded
from facts.models import OpenMMLabModel, Recipe
from facts.models.weights import sha256
from facts.moments.memory import MemoryPolicy
from facts.utils.files import writable_folder

Level = Literal["fine", "warning", "problem"]
COLORS = {"fine": "green", "warning": "yellow", "problem": "red"}


@dataclass(frozen=True)
class Finding:
    """One check: its subject, its state, and the remedy for a problem."""

    what: str
    level: Level
    detail: str
    advice: str = ""


def look_first(config: DictConfig, columns: list[list[GridCell]], force: bool, console: Console) -> None:
    """Stop before hours of work that cannot succeed; print problems only, as they are found."""
    found = chain(of_machine(config), of_cells(configs_of(columns)))
    if show_findings((finding for finding in found if finding.level != "fine"), console) and not force:
        raise SystemExit("nothing was started; fix the problems above, or run anyway with force=true")


def configs_of(columns: list[list[GridCell]]) -> list[list[DictConfig]]:
    return [[cell.known_config for cell in column] for column in columns]


def of_machine(config: DictConfig) -> Iterator[Finding]:
    """Check what needs no look at cells: packages, device, compiler, tracking."""
    yield Finding("packages", "fine", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES))
    yield device(config)
    yield from compiler(config)
    yield tracking(config)


def of_cells(columns: list[list[DictConfig]]) -> Iterator[Finding]:
    """Check everything else that these cells need, what is quick first; they are grouped by network and data."""
    yield from extras(chain(*columns))
    columns = [column for column in columns if not missing_packages(OF_TASKS.get(column[0].task.name))]
    configs = list(chain(*columns))
    yield from data(configs)
    yield from checkpoints(configs)
    if needs := [estimate(column) for column in columns]:
        yield memory(configs[0], max(needs, key=lambda need: need.memory))
        yield disk(configs[0], sum(need.disk for need in needs))


def extras(configs: Iterable[DictConfig]) -> Iterator[Finding]:
    for extra in dict.fromkeys(extra for config in configs for extra in extras_of(config)):
        what, lacking = f"packages of the extra {extra}", missing_packages(extra)
        if lacking:
            yield Finding(what, "problem", f"{', '.join(lacking)} missing", how_to_install(extra))
        else:
            yield Finding(what, "fine", "installed")


def extras_of(config: DictConfig) -> Iterator[str]:
    """Extras that a cell needs besides the base installation."""
    if config.analysis and config.analysis.name == "token_coupling":
        yield "analysis"
    if config.search.get("solver") == "highs":
        yield "highs"
    if config.pruning and config.pruning.name == "isomorphic":
        yield "pruning"
    if extra := OF_TASKS.get(config.task.name):
        yield extra
    if extra := OF_LAUNCHERS.get(config.launcher["_target_"]):
        yield extra


def device(config: DictConfig) -> Finding:
    """Check that the device exists."""
    name = config.hardware.device
    if not name.startswith("cuda"):
        return Finding("device", "fine", f"{torch.get_num_threads()} CPU threads")
    if torch.cuda.is_available():
        return Finding("device", "fine", torch.cuda.get_device_name())
    return Finding("device", "problem", "torch sees no GPU", "choose hardware=cpu, or install the driver")


def memory(config: DictConfig, need: Estimate) -> Finding:
    """Check that the device has the memory that the largest network needs."""
    on_gpu = config.hardware.device.startswith("cuda") and torch.cuda.is_available()
    free = torch.cuda.mem_get_info()[0] if on_gpu else _free_memory()
    detail = f"{decimal(free)} free, some {decimal(round(need.memory))} needed"
    if need.memory < free:
        return Finding("memory", "fine", detail)
    num_parts = need.num_parts(free, MemoryPolicy(**config.hardware.memory)) if on_gpu else None
    if num_parts:
        detail += f"; batches in parts, here {num_parts}, and moments in main memory would fit"
    advice = "lower task.batch_size, or set hardware.memory.checkpoint_blocks=true or .layers_at_once"
    return Finding("memory", "warning", detail, advice)


def _free_memory() -> int:
    """Available bytes of main memory on Linux; on other systems, no bound is known."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 2**63
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def compiler(config: DictConfig) -> Iterator[Finding]:
    """Check the C++ compiler that torch.compile needs."""
    if config.hardware.compile:
        name = os.environ.get("CXX", "g++")
        if path := shutil.which(name):
            yield Finding("compiler", "fine", path)
        else:
            yield Finding("compiler", "problem", f"no {name}", "install g++, or set CXX, or hardware.compile=false")


def checkpoints(configs: Iterable[DictConfig]) -> Iterator[Finding]:
    """Check each network: the file and its hash, or the source of its weights."""
    for name, recipe in _distinct(configs, "model").items():
        what = f"weights of {name}"
        try:
            path = recipe.checkpoint()
        except (OSError, ValueError) as error:
            advice = "put the file there, or set checkpoints, or the model's weights, to where it is"
            yield Finding(what, "problem", str(error), advice + sources(name, recipe))
            continue
        if path:
            yield Finding(what, "fine", f"{path}, sha256 {sha256(path)}")
        elif recipe.weights == "random":
            yield Finding(what, "warning", "random", "of use for measuring speed alone")
        else:
            yield Finding(what, "warning", "not on this machine", "they are fetched from their hub at the start")


def sources(name: str, recipe: Recipe) -> str:
    """Advice on the source of a detector's or segmenter's weights, empty for other networks."""
    if not isinstance(recipe, OpenMMLabModel):
        return ""
    training = f"python -m experiments.train_dense model={name} task={TASKS[recipe.toolbox]} trains it"
    if url := recipe.published:
        start = Path(url).stem.rpartition("-")[2]
        return f". It is published, with a SHA-256 that begins with {start}: {url}. Or {training}"
    return f". Nobody publishes it: {training}"


def data(configs: Iterable[DictConfig]) -> Iterator[Finding]:
    """Check the data of each task: layout and counts."""
    configs = list(configs)
    for name, task in _distinct(configs, "task").items():
        try:
            yield Finding(f"data of {name}", "fine", task.inspect())
        except (OSError, ValueError, ImportError) as error:
            yield Finding(
                f"data of {name}",
                "problem",
                worded(str(error), configs[0].profile.name),
                "see docs/reproducing.md, At full scale",
            )


def _distinct(configs: Iterable[DictConfig], group: str) -> dict[str, Any]:
    """Objects that the cells name in one group, built, by name."""
    nodes = {config[group].name: config[group][config.profile.name] for config in configs}
    return {name: instantiate(node) for name, node in nodes.items()}


def disk(config: DictConfig, needed: float) -> Finding:
    """Check the disk space in the results folder for the growth of the cache."""
    try:
        folder = writable_folder(results_folder(config))
    except OSError as error:
        return Finding("disk", "problem", str(error), "set results to a folder that can be written to")
    held = sum(path.stat().st_size for path in (folder / "cache").rglob("*") if path.is_file())
    needed, free = max(0, needed - held), shutil.disk_usage(folder).free
    detail = f"{folder}: {decimal(free)} free, some {decimal(round(needed))} needed"
    if needed < free:
        return Finding("disk", "fine", detail)
    return Finding("disk", "problem", detail, "set results to a larger disk, or run one network after another")


def tracking(config: DictConfig) -> Finding:
    """Check W&B's mode, and its account if the mode needs one."""
    mode = config.tracking.mode
    if mode != "online":
        return Finding("tracking", "fine", f"W&B {mode}")
    import wandb

    if wandb.api.api_key:
        return Finding("tracking", "fine", "W&B online")
    return Finding("tracking", "problem", "W&B online without an account", "run `wandb login`, or tracking=offline")


def show_findings(findings: Iterable[Finding], console: Console) -> bool:
    """Print each finding when it comes. Returns whether there was a problem."""
    problems = 0
    for finding in findings:
        problems += finding.level == "problem"
        console.print(
            f"[{COLORS[finding.level]}]{finding.level:8}[/] {escape(finding.what)}: {escape(finding.detail)}",
            soft_wrap=True,
        )
        if finding.advice:
            console.print(f"         to do: {escape(finding.advice)}", soft_wrap=True)
    return problems > 0
