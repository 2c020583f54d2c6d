"""Check that a run can succeed, as `experiments.reproduce` does before it starts: `python -m experiments.doctor`."""

import importlib.metadata
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from experiments.cell import Cell, cells_of, load_task, recall, results_folder
from experiments.compose import command
from experiments.config import as_json
from experiments.grid import chosen_experiments
from experiments.record import PACKAGES
from experiments.runner import started
from facts.utils.files import writable_folder
from facts.utils.options import first_line


class Finding(NamedTuple):
    """One check: its subject, its outcome, and how to fix a problem."""

    what: str
    detail: str
    is_fine: bool = True
    advice: str = ""


def look_first(config: DictConfig, cells: list[Cell], console: Console) -> None:
    """Print problems before a run starts. Raises `SystemExit` if there are any, unless `force`."""
    problems = show_findings((finding for finding in examine(config, cells) if not finding.is_fine), console)
    if problems and not config.force:
        raise SystemExit("nothing was started; fix the problems above, or run anyway with force=true")


def show_findings(findings: Iterable[Finding], console: Console) -> bool:
    """Print each finding as it comes. Returns whether there was a problem."""
    has_problem = False
    for what, detail, is_fine, advice in findings:
        has_problem |= not is_fine
        level = "[green]fine    [/]" if is_fine else "[red]problem [/]"
        console.print(f"{level} {escape(what)}: {escape(detail)}", soft_wrap=True)
        if advice:
            console.print(f"         to do: {escape(advice)}", soft_wrap=True)
    return has_problem


def examine(config: DictConfig, cells: list[Cell]) -> Iterator[Finding]:
    """Check the machine, then the states of the cells, and the data that those to do need."""
    on_gpu = config.hardware.device.startswith("cuda") and torch.cuda.is_available()
    yield Finding("packages", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES))
    yield Finding("device", torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} CPU threads")
    yield check("tracking", partial(tracking, config.tracking.mode), "run `wandb login`, or choose tracking=offline")
    yield check("disk", partial(free_space, results_folder(config)), "set results to another folder or disk")
    recall(cells, results_folder(config) / "records")
    names = Counter(cell.state().name for cell in cells)
    yield Finding("cells", ", ".join(f"{number:,} {name}" for name, number in names.items()))
    faults: dict[str, str] = {}
    for cell in cells:
        faults.setdefault(cell.fault, cell.place)
    yield from (Finding(place, fault, False) for fault, place in faults.items() if fault)
    left = [cell.config for cell in cells if cell.is_left]
    tasks = [*(each.task for each in left), *(each.stages.task for each in left if each.stages)]
    used, seen = {as_json(task[config.profile.name]): task.name for task in tasks}, set[Finding]()
    for recipe, name in used.items():
        data = check(f"data of {name}", load_task(recipe, f"task of {name}").inspect, "see docs/reproducing.md")
        yield from {data} - seen
        seen.add(data)


def check(what: str, look: Callable[[], str], advice: str) -> Finding:
    """Describe what `look` finds; if it raises an error, the first line is the problem."""
    try:
        return Finding(what, look())
    except Exception as error:
        return Finding(what, first_line(error), False, advice)


def tracking(mode: str) -> str:
    if mode == "online":
        import wandb

        if not wandb.api.api_key:
            raise ValueError("W&B online without an account")
    return f"W&B {mode}"


def free_space(folder: Path) -> str:
    return f"{decimal(shutil.disk_usage(writable_folder(folder)).free)} free in {folder}"


@command("reproduce")
def main(config: DictConfig) -> None:
    with started():
        cells = [cell for experiment in chosen_experiments(config) for cell in cells_of(experiment)]
        if show_findings(examine(config, cells), Console()):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
