"""Check that a run can succeed, as `experiments.reproduce` does before it starts: `python -m experiments.doctor`."""

import importlib.metadata
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from experiments.cell import Cell, results_folder
from experiments.config import EXTRAS, command, how_to_install, in_a_line, instantiate, missing_packages
from experiments.grid import GridCell, chosen_experiments, samples_of
from experiments.record import PACKAGES
from experiments.runner import started
from facts.models import OpenMMLabModel, Recipe
from facts.models.weights import sha256
from facts.utils.files import writable_folder

COLORS = {"fine": "green", "problem": "red"}


class Finding(NamedTuple):
    """One check: its subject, its outcome, and how to fix a problem."""

    what: str
    level: Literal["fine", "problem"]
    detail: str
    advice: str = ""


def look_first(config: DictConfig, grid: Iterable[GridCell], console: Console) -> None:
    """Print problems before a run starts. Raises `SystemExit` if there are any, unless `force`."""
    found = (finding for finding in examine(config, grid) if finding.level != "fine")
    if show_findings(found, console) and not config.force:
        raise SystemExit("nothing was started; fix the problems above, or run anyway with force=true")


def show_findings(findings: Iterable[Finding], console: Console) -> bool:
    """Print each finding as it comes. Returns whether there was a problem."""
    problems = 0
    for what, level, detail, advice in findings:
        problems += level == "problem"
        console.print(f"[{COLORS[level]}]{level:8}[/] {escape(what)}: {escape(detail)}", soft_wrap=True)
        if advice:
            console.print(f"         to do: {escape(advice)}", soft_wrap=True)
    return problems > 0


def examine(config: DictConfig, grid: Iterable[GridCell]) -> Iterator[Finding]:
    """Check the machine, then everything that these cells need."""
    yield Finding("packages", "fine", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES))
    on_gpu = config.hardware.device.startswith("cuda")
    device = torch.cuda.get_device_name if on_gpu else lambda: f"{torch.get_num_threads()} CPU threads"
    yield check("device", device, "choose hardware=cpu, or install the driver")
    yield check("tracking", partial(tracking, config.tracking.mode), "run `wandb login`, or choose tracking=offline")
    yield check("disk", partial(free_space, results_folder(config)), "set results to another folder or disk")
    seen = set[object]()
    for cell in grid:
        if cell.config is None:
            continue
        if fault := "" if on_gpu and not torch.cuda.is_available() else fault_of(cell.config):
            if fault not in seen:
                yield Finding(f"{cell.experiment}, {cell.row}, {cell.column}", "problem", fault)
            seen.add(fault)
            continue
        for what, look, advice in needed_by(cell.config):
            if (need := (what, repr(look))) in seen:  # rows may differ in where they look
                continue
            if (finding := check(what, look, advice)) not in seen:
                yield finding
            seen |= {need, finding}


def fault_of(config: DictConfig) -> str:
    """Say what is wrong with a cell's settings, empty if nothing is; packages and files are checked elsewhere."""
    with suppress(ImportError, OSError):
        try:
            Cell.of(config)
        except (ValueError, OmegaConfBaseException) as error:
            return in_a_line(error)
    return ""


def needed_by(config: DictConfig) -> Iterator[tuple[str, Callable[[], str], str]]:
    """Name each thing that a cell needs, with a function that looks for it, and advice if it is missing."""
    chosen = [config[group].name for group in ("analysis", "pruning", "task") if config[group]]
    for extra in (EXTRAS[name] for name in chosen if name in EXTRAS):
        yield f"packages of the extra {extra}", partial(installed, extra), how_to_install(extra)
    if missing_packages(EXTRAS.get(config.task.name)):
        return
    profile, name = config.profile.name, config.model.name
    for task in (config.task, *([config.stages.task] if config.stages else [])):
        yield f"data of {task.name}", instantiate(task[profile]).inspect, "see docs/reproducing.md, At full scale"
    recipe = instantiate(config.model[profile])
    advice = "put the file there, or set checkpoints, or the model's weights, to where it is"
    yield f"weights of {name}", partial(weights, recipe), advice
    if isinstance(recipe, OpenMMLabModel) and recipe.classifier:
        yield f"weights of {name}'s classifier", partial(weights, recipe.classifier), advice


def check(what: str, look: Callable[[], str], advice: str = "") -> Finding:
    """Describe what `look` finds; if it raises an error, the first line is the problem."""
    try:
        return Finding(what, "fine", look())
    except Exception as error:
        return Finding(what, "problem", (str(error).strip() or repr(error)).partition("\n")[0], advice)


def installed(extra: str) -> str:
    if missing := missing_packages(extra):
        raise ImportError(f"{', '.join(missing)} missing")
    return "installed"


def tracking(mode: str) -> str:
    if mode == "online":
        import wandb

        if not wandb.api.api_key:
            raise ValueError("W&B online without an account")
    return f"W&B {mode}"


def free_space(folder: Path) -> str:
    return f"{decimal(shutil.disk_usage(writable_folder(folder)).free)} free in {folder}"


def weights(recipe: Recipe) -> str:
    if path := recipe.checkpoint():
        return f"{path}, sha256 {sha256(path)}"
    is_random = recipe.weights == "random"
    return "random, for measuring speed only" if is_random else "to be fetched from their hub at the start"


@command("reproduce")
def main(config: DictConfig) -> None:
    with started():
        if show_findings(examine(config, samples_of(chosen_experiments(config))), Console()):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
