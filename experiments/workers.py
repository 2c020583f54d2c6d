"""Work on a grid of cells by several processes at once, in the order of the experiments."""

import logging.config
import os
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from experiments.cell import Cell
from experiments.columns import run_cells, share_data_pass
from experiments.grid import GridCell, by_data
from experiments.instantiation import instantiate
from experiments.launchers.base import Launcher
from experiments.launchers.processes import Processes
from facts.utils import distributed
from facts.utils.stopwatch import hide_displays

log = logging.getLogger(__name__)

Part = list[GridCell]
"""The cells of one experiment that share a network and its data."""


def number_of_workers(wanted: int | None) -> int:
    """As many as wanted, or as there are processors; one if this process is one of several already."""
    return 1 if distributed.size() > 1 else wanted or os.cpu_count() or 1


def launcher_of(config: DictConfig) -> Launcher:
    """Build the launcher. Raises `ValueError` for another than this machine's processes under torchrun."""
    launcher = instantiate(config.launcher)
    if distributed.size() > 1 and not isinstance(launcher, Processes):
        raise ValueError("torchrun divides every cell among its processes: start it without launcher=")
    return launcher


def prepare(logging_config: Any, folder: Path) -> None:
    """Make a process of a launcher log as configured, without bars, and see paths as its parent does."""
    os.chdir(folder)
    hide_displays()
    logging.config.dictConfig(logging_config)


def run_grid(grid: list[GridCell], workers: Executor, num_workers: int) -> Iterator[Part]:
    """Run all cells that have a configuration; yield each part when it is done, on at most so many workers.

    The first part of a network waits for a data pass for all its cells. Cells that measure time come last, alone.
    Raises `BrokenExecutor` if there are no workers left.
    """
    untimed: list[GridCell] = []
    timed: list[GridCell] = []
    for cell in grid:
        if cell.config is not None:
            (timed if is_timed(cell) else untimed).append(cell)
    passes = {column[0].data: column for column in by_data([*untimed, *timed])}
    waiting, shared = _parts(untimed), set[str]()
    running: dict[Future, tuple] = {}
    while waiting or running:
        while len(running) < num_workers and (task := _next_task(waiting, passes, shared)):
            running[workers.submit(*task[1:])] = task
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            data, task, cells = running.pop(future)
            if task is run_part:
                yield _done(cells, future)
            else:
                _result(cells, future)
                shared.add(data)  # if its process died, each cell runs its own
    for part in _parts(timed):
        yield _done(part, workers.submit(run_part, part))


def _parts(cells: list[GridCell]) -> list[Part]:
    """By experiment, and within one by network and data."""
    experiments = dict.fromkeys(cell.experiment for cell in cells)
    return [part for name in experiments for part in by_data(cell for cell in cells if cell.experiment == name)]


def _next_task(waiting: list[Part], passes: dict[str, Part], shared: set[str]) -> tuple | None:
    """The first part whose data pass is done, or the first data pass that has not begun; None if there is neither."""
    for part in waiting:
        data = part[0].data
        if data in shared:
            waiting.remove(part)
            return data, run_part, part
        if data in passes:
            return data, share_data_pass, passes.pop(data)
    return None


def run_part(part: Part) -> Part:
    run_cells(part)
    return part


def _done(part: Part, future: Future) -> Part:
    """The part with the records and states that a worker found; if its process died, all cells have failed."""
    found = _result(part, future) or [replace(cell, status="failed") for cell in part]
    for cell, result in zip(part, found, strict=True):
        cell.record, cell.status = result.record, result.status
    return part


def _result(part: Part, future: Future) -> Part | None:
    """The part that a worker sends back; None if its process died."""
    try:
        return future.result()
    except Exception as error:  # of the launcher: cells note their own
        log.error("%s, %s: the process died (%s)", part[0].experiment, part[0].column, error)
        return None


def is_timed(grid_cell: GridCell) -> bool:
    """Whether the cell measures time, so that nothing else may run beside it."""
    try:
        return Cell.of(grid_cell.known_config).depends_on_device
    except (OSError, ValueError, ImportError):
        return False  # it will fail when it runs
