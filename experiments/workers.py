"""Work on the cells of tables, by processes of this machine."""

import logging.config
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from experiments.cell import Cell, by_data
from experiments.runner import LISTENER, run_part
from facts.utils.progress import hide_displays
from facts.utils.streams import make_output_lasting

log = logging.getLogger(__name__)

Cells = list[Cell]
Run = Callable[[Callable[[Cells], Cells], Iterable[Cells]], Iterable[Cells]]
"""Like `map`."""


def line_of_each(tables: Iterable[Cells]) -> Callable[[Cell], None]:
    """Make a function that logs, of each cell that was left and has run, its value and seconds, and the time left."""
    cells, start = [*chain.from_iterable(tables)], time.monotonic()
    left = {cell.place: cell.experiment for cell in cells if cell.is_left}
    totals, num_left = Counter(cell.experiment for cell in cells), len(left)

    def tell(cell: Cell) -> None:
        if left.pop(cell.place, None):
            record, table, metric = cell.record, cell.experiment, cell.config.experiment.ranked_by
            values = [f"{metric} {record.values[metric]:.4g}"] if record and metric in record.values else []
            taken = f"{sum(record.seconds.values()):.0f} s" if record and not cell.error else "failed"
            number = f"{totals[table] - [*left.values()].count(table)} of {totals[table]}"
            rest = timedelta(seconds=round((time.monotonic() - start) / (num_left - len(left)) * len(left)))
            place = cell.place.removeprefix(f"{table}, ")
            log.info("%s, %s: %s: %s; %s left", table, number, place, ", ".join([*values, taken]), rest)

    return tell


def finished(tables: Iterable[Cells], num_workers: int, device: str) -> Iterator[Cells]:
    """Run the cells of tables; yield each table's when they are done. If a worker dies, new ones take over, once."""
    left = list(tables)
    tell = line_of_each(left)
    for has_died in (False, True):
        try:
            with workers(num_workers, device, tell) as run:
                for cells in run_tables([*left], run):
                    left.pop(0)
                    yield cells
            return
        except BrokenExecutor as error:
            if has_died:
                advice = "start again with fewer workers=; finished work is kept"
                raise SystemExit(f"a worker died again, often for lack of memory ({error}): {advice}") from error
            log.error("a worker died (%s): new ones finish the work", error)


def run_tables(tables: list[Cells], run: Run) -> Iterator[Cells]:
    """Run the cells of tables, those that share a network and its data in one process; yield tables in order."""
    parts = [by_data(cells) for cells in tables]
    done = iter(run(run_part, chain.from_iterable(parts)))
    for cells, own in zip(tables, parts, strict=True):
        if cells:
            log.info("%s: %d cells", cells[0].experiment, len(cells))
        for part in own:
            for cell, result in zip(part, next(done), strict=True):
                cell.record, cell.error = result.record, result.error
        yield cells


@contextmanager
def workers(num_workers: int, device: str, tell: Callable[[Cell], None]) -> Iterator[Run]:
    """Yield a `map` over processes, or in this one if it works alone. On the `device` cuda, they share out the GPUs.

    They `tell` of each finished cell in this process.
    """
    if num_workers == 1:
        LISTENER.set(tell)
        yield map
        return
    context = multiprocessing.get_context("spawn")
    cells, gpus, names = context.SimpleQueue(), context.SimpleQueue(), [""]
    if device == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [*map(str, range(torch.cuda.device_count()))]
    for number in range(num_workers):
        gpus.put(names[number % len(names)])
    logging_config = OmegaConf.to_container(HydraConfig.get().job_logging)
    pool = ProcessPoolExecutor(num_workers, context, _begin, (logging_config, Path.cwd(), gpus, cells))
    threading.Thread(target=lambda: [*map(tell, iter(cells.get, None))], daemon=True).start()
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(logging_config: Any, folder: Path, gpus: SimpleQueue, cells: SimpleQueue) -> None:
    """Prepare a process: it ends with its parent, has its own GPU, and logs and resolves paths as its parent does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if gpu := gpus.get():
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before CUDA is initialised
    os.chdir(folder)
    hide_displays()
    make_output_lasting()
    logging.config.dictConfig(logging_config)
    LISTENER.set(cells.put)


def _end_with_parent() -> None:
    """End with a killed parent, which cannot stop its workers: they would wait for work forever."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
