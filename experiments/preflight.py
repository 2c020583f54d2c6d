"""Preflight: checks before a run starts, of packages, device, checkpoints, data, disk space and tracking."""

import importlib.metadata
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

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
from facts.tasks import ImageNet
from facts.utils.files import writable_folder

Level = Literal["fine", "warning", "problem"]
CROP_BYTES = 3 * 224**2  # of a decoded image
COLORS = {"fine": "green", "warning": "yellow", "problem": "red"}


@dataclass(frozen=True)
class Finding:
    """One check: its subject, its state, and the remedy for a problem."""

    what: str
    level: Level
    detail: str
    advice: str = ""


def look_first(columns: list[list[GridCell]], force: bool, console: Console) -> None:
    """Stop before hours of work that cannot succeed; print problems only."""
    if wrong := [finding for finding in preflight(configs_of(columns)) if finding.level != "fine"]:
        show_findings(wrong, console)
    if any(finding.level == "problem" for finding in wrong) and not force:
        raise SystemExit("nothing was started; fix the problems above, or run anyway with force=true")


def configs_of(columns: list[list[GridCell]]) -> list[list[DictConfig]]:
    return [[cell.known_config for cell in column] for column in columns]


def preflight(columns: list[list[DictConfig]]) -> list[Finding]:
    """Check everything that these cells need; they are grouped by network and data."""
    configs = list(itertools.chain(*columns))
    found = list(packages(configs))
    columns = [column for column in columns if not missing_packages(OF_TASKS.get(column[0].task.name))]
    if not columns:
        return found
    configs = list(itertools.chain(*columns))
    needs = [estimate(column) for column in columns]
    return [
        *found,
        device(configs[0], max(needs, key=lambda need: need.memory)),
        *compiler(configs[0]),
        *checkpoints(configs),
        *data(configs),
        disk(configs[0], sum(need.disk for need in needs) + size_of_crops(configs)),
        tracking(configs[0]),
    ]


def packages(configs: Iterable[DictConfig]) -> Iterator[Finding]:
    yield Finding("packages", "fine", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES))
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


def device(config: DictConfig, need: Estimate) -> Finding:
    """Check that the device exists and has the memory that the largest network needs."""
    name = config.hardware.device
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            return Finding("device", "problem", "torch sees no GPU", "choose hardware=cpu, or install the driver")
        free, what = torch.cuda.mem_get_info()[0], torch.cuda.get_device_name()
    else:
        free, what = _free_memory(), f"{torch.get_num_threads()} CPU threads"
    detail = f"{what}; {decimal(free)} free, some {decimal(round(need.memory))} needed"
    if need.memory < free:
        return Finding("device", "fine", detail)
    num_parts = need.num_parts(free, MemoryPolicy(**config.hardware.memory)) if name.startswith("cuda") else None
    if num_parts:
        detail += f"; batches in parts, here {num_parts}, and moments in main memory would fit"
    advice = "lower task.batch_size, or set hardware.memory.checkpoint_blocks=true or .layers_at_once"
    return Finding("device", "warning", detail, advice)


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
    """Where the weights of a detector or segmenter come from."""
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


def size_of_crops(configs: Iterable[DictConfig]) -> int:
    """Bytes of the decoded images that a run at 224 pixels will keep, less those that are there."""
    tasks = [config.task[config.profile.name] for config in configs]
    wanted = {
        str(task.crops): CROP_BYTES * (ImageNet.num_evaluation + task.num_calibration + task.num_sensitivity)
        for task in tasks
        if task.get("crops")
    }
    held = sum(path.stat().st_blocks * 512 for folder in wanted for path in Path(folder).glob("*.crops"))
    return max(0, sum(wanted.values()) - held)


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


def show_findings(findings: Iterable[Finding], console: Console) -> None:
    table = Table(show_lines=True)
    for heading in ("what", "", "found", "what to do"):
        table.add_column(heading)
    for finding in findings:
        level = f"[{COLORS[finding.level]}]{finding.level}"
        table.add_row(finding.what, level, escape(finding.detail), escape(finding.advice))
    console.print(table)
