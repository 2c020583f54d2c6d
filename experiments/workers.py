"""Work on a grid of cells by several processes at once, in the order of the experiments."""

import logging.config
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from typing import Any

from experiments.cell import Cell
from experiments.columns import run_cells, share_data_pass
from experiments.grid import GridCell, by_data
from facts.utils import distributed
from facts.utils.progress import hide_progress

Part = list[GridCell]
"""The cells of one experiment that share a network and its data."""


class AtOnce(Executor):
    """An executor that does the work when it is given, in this process."""

    def submit(self, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        future.set_result(task(*args, **kwargs))
        return future


def number_of_workers(wanted: int | None) -> int:
    """As many as wanted, or as there are processors; one if this process is one of several already."""
    return 1 if distributed.size() > 1 else wanted or os.cpu_count() or 1


def executor(num_workers: int, logging_config: Any) -> Executor:
    """An executor of so many processes that log as configured; of this process alone for one."""
    if num_workers == 1:
        return AtOnce()
    return ProcessPoolExecutor(
        num_workers,
        multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(logging_config,),
    )


def _begin(logging_config: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    hide_progress()
    logging.config.dictConfig(logging_config)


def _end_with_parent() -> None:
    """A killed parent cannot tell its workers, and they would wait for work forever."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def run_grid(grid: list[GridCell], workers: Executor, num_workers: int) -> Iterator[Part]:
    """Run all cells that have a configuration; yield each part when it is done.

    The first part of a network waits for a data pass for all its cells. Cells that measure time come last, alone.
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
            done = future.result()
            if task is share_data_pass:
                shared.add(data)
            else:
                yield _filled(cells, done)
    for part in _parts(timed):
        yield _filled(part, workers.submit(run_part, part).result())


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


def _filled(part: Part, done: Part) -> Part:
    """The part with the records and states that a worker found."""
    for cell, result in zip(part, done, strict=True):
        cell.record, cell.status = result.record, result.status
    return part


def is_timed(grid_cell: GridCell) -> bool:
    """Whether the cell measures time, so that nothing else may run beside it."""
    try:
        return Cell.of(grid_cell.known_config).depends_on_device
    except (OSError, ValueError, ImportError):
        return False  # it will fail when it runs
