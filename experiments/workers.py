"""Work on the cells of tables, by processes of this machine."""

import logging.config
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from experiments.cell import results_folder
from experiments.config import USER_ERRORS, Experiment
from experiments.grid import GridCell, by_data, grid_of
from experiments.runner import alone, beside_others, collect_moments, open_cell, run_cell
from facts.utils.files import HeldElsewhere
from facts.utils.progress import hide_displays
from facts.utils.streams import make_output_lasting

log = logging.getLogger(__name__)

Grid = list[GridCell]
Part = list[GridCell]
"""The cells of one experiment that share a network and its data."""
Run = Callable[[Callable[[Part], Part], Iterable[Part]], Iterable[Part]]
"""Like `map`."""


def run_part(part: Part) -> Part:
    """Run the cells of a part after one data pass for all of them; return them with their records."""
    with beside_others(results_folder(part[0].known_config)):
        share_data_pass(part)
    run_cells(part)
    return part


def share_data_pass(part: Part) -> None:
    """Cache what the estimators of the unfinished cells need. After a failure, each cell runs its own pass."""
    cells = []
    for grid_cell in part:
        with suppress(Exception):  # it fails again when it runs
            cells.append(open_cell(grid_cell.known_config))
    try:
        collect_moments(cells)
    except Exception as error:
        log.error("the shared data pass failed (%s); each cell runs its own", error)


def run_cells(part: Part) -> None:
    """Run the cells and write their records. A failure does not stop the others; cells that run elsewhere come last.

    A waiting process takes no turn: the other process may be waiting for its turn to measure.
    """
    elsewhere = []
    for cell in part:
        with beside_others(results_folder(cell.known_config)):
            if not fill(cell, wait=False):
                elsewhere.append(cell)
    for cell in elsewhere:
        fill(cell, wait=True)


def fill(grid_cell: GridCell, wait: bool) -> bool:
    """Run a cell; return False if another process runs it and `wait` is False."""
    cell = None
    try:
        cell = open_cell(grid_cell.known_config)
        with alone() if cell.runs_alone else nullcontext():
            grid_cell.record, grid_cell.status = run_cell(cell, wait, grid_cell.words), "done"
    except HeldElsewhere:
        return False
    except Exception as error:
        grid_cell.record, grid_cell.status = cell.earlier_record() if cell else None, "failed"
        log.error("%s: %s", grid_cell.words, reason_of(error))
    return True


def reason_of(error: Exception) -> str:
    """Say in a line why a cell failed; for an error in code, also its type and its last line outside libraries."""
    text = str(error)
    if not isinstance(error, USER_ERRORS):
        places = traceback.extract_tb(error.__traceback__)
        last = next((each for each in reversed(places) if "site-packages" not in each.filename), places[-1])
        text = f"{type(error).__name__}: {text} ({last.filename}, line {last.lineno})"
    return "; ".join([text, *getattr(error, "__notes__", ())])


def finished(experiments: Iterable[Experiment], num_workers: int, device: str) -> Iterator[Grid]:
    """Run all cells of experiments; yield each grid when it is done. If a worker dies, new ones take over, once."""
    left = list(experiments)
    for has_died in (False, True):
        try:
            with workers(num_workers, device) as run:
                for grid in run_grids([grid_of(experiment) for experiment in left], run):
                    left.pop(0)
                    yield grid
            return
        except BrokenExecutor as error:
            if has_died:
                advice = "start again with fewer workers=; finished work is kept"
                raise SystemExit(f"a worker died again, often for lack of memory ({error}): {advice}") from error
            log.error("a worker died (%s): new ones finish the work", error)


def run_grids(grids: list[Grid], run: Run) -> Iterator[Grid]:
    """Run the cells of experiments, those that share a network and its data in one process; yield grids in order."""
    parts = [by_data(grid) for grid in grids]
    done = iter(run(run_part, chain.from_iterable(parts)))
    for grid, own in zip(grids, parts, strict=True):
        log.info("%s: %d cells", grid[0].experiment, sum(map(len, own)))
        is_checked = False
        for part in own:
            for cell, result in zip(part, next(done), strict=True):
                cell.record, cell.status = result.record, result.status
                log.info("%s: %s", cell.words, cell.status)
            if not is_checked:
                is_checked = warn_of_unknown_metrics(part)
        yield grid


def warn_of_unknown_metrics(part: Part) -> bool:
    """Name the metrics of a table that none of these cells has, which may be misspelt; return if any cell is done."""
    values = [cell.record.values for cell in part if cell.record and cell.record.status == "done"]
    found = sorted({*chain.from_iterable(values)})
    wanted = part[0].known_config.experiment.metrics if found else ()
    if lacking := ", ".join(metric for metric in wanted if metric not in found):
        log.warning("%s: no cell so far has the metric %s; there are %s", part[0].experiment, lacking, ", ".join(found))
    return bool(found)


@contextmanager
def workers(num_workers: int, device: str) -> Iterator[Run]:
    """Yield a `map` over processes, or in this one if it works alone. On the `device` cuda, they share out the GPUs."""
    if num_workers == 1:
        yield map
        return
    context = multiprocessing.get_context("spawn")
    gpus, names = context.SimpleQueue(), [""]
    if device == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [*map(str, range(torch.cuda.device_count()))]
    for number in range(num_workers):
        gpus.put(names[number % len(names)])
    logging_config = OmegaConf.to_container(HydraConfig.get().job_logging)
    pool = ProcessPoolExecutor(num_workers, context, _begin, (logging_config, Path.cwd(), gpus))
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(logging_config: Any, folder: Path, gpus: SimpleQueue) -> None:
    """Prepare a process: it ends with its parent, has its own GPU, and logs and resolves paths as its parent does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if gpu := gpus.get():
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before CUDA is initialised
    os.chdir(folder)
    hide_displays()
    make_output_lasting()
    logging.config.dictConfig(logging_config)


def _end_with_parent() -> None:
    """End with a killed parent, which cannot stop its workers: they would wait for work forever."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
