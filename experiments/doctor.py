"""Check that a run can succeed, as `experiments.reproduce` does before it starts: `python -m experiments.doctor`."""

import importlib.metadata
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

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

COLORS = {"fine": "green", "problem": "red"}


class Finding(NamedTuple):
    """One check: its subject, its outcome, and how to fix a problem."""

    what: str
    level: Literal["fine", "problem"]
    detail: str
    advice: str = ""


def look_first(config: DictConfig, cells: list[Cell], console: Console) -> None:
    """Print problems before a run starts. Raises `SystemExit` if there are any, unless `force`."""
    found = (finding for finding in examine(config, cells) if finding.level != "fine")
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


def examine(config: DictConfig, cells: list[Cell]) -> Iterator[Finding]:
    """Check the machine, then the states of the cells, and the data that those to do need."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    on_gpu = config.hardware.device.startswith("cuda") and torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} CPU threads"
    yield Finding("packages", "fine", versions)
    yield Finding("device", "fine", device)
    yield check("tracking", partial(tracking, config.tracking.mode), "run `wandb login`, or choose tracking=offline")
    yield check("disk", partial(free_space, results_folder(config)), "set results to another folder or disk")
    recall(cells, results_folder(config) / "records")
    seen, names = set[object](), Counter[str]()
    for cell in cells:
        state = cell.state()
        names[state.name] += 1
        if state.name == "blocked" and state.why not in seen:
            yield Finding(cell.place, "problem", state.why)
            seen.add(state.why)
        stages = [cell.config.stages.task] if cell.config.stages else []
        for task in (cell.config.task, *stages) if state.name in ("to do", "failed") else ():
            if (recipe := as_json(task[cell.profile])) not in seen:
                look = load_task(recipe, f"task.{cell.profile}").inspect
                finding = check(f"data of {task.name}", look, "see docs/reproducing.md, At full scale")
                yield from [finding] * (finding not in seen)
                seen |= {recipe, finding}
    yield Finding("cells", "fine", ", ".join(f"{number:,} {name}" for name, number in names.items()))


def check(what: str, look: Callable[[], str], advice: str) -> Finding:
    """Describe what `look` finds; if it raises an error, the first line is the problem."""
    try:
        return Finding(what, "fine", look())
    except Exception as error:
        return Finding(what, "problem", (str(error).strip() or repr(error)).partition("\n")[0], advice)


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
