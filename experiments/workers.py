"""Work on the cells of tables: by processes of this machine, or by one of Hydra's launchers."""

import logging.config
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from itertools import islice
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from experiments.cell import Cell
from experiments.columns import run_cells, share_data_pass
from experiments.grid import GridCell, by_data, chosen_experiments, grid_of
from facts.utils.display import hide_displays

log = logging.getLogger(__name__)

Part = list[GridCell]
"""The cells of one experiment that share a network and its data."""


def parts_of(grid: list[GridCell]) -> list[tuple[Part, bool]]:
    """Divide an experiment into parts, each with whether it measures time, so that nothing else may run meanwhile."""
    timed = {id(cell) for cell in grid if cell.config is not None and is_timed(cell)}
    untimed = by_data(cell for cell in grid if id(cell) not in timed)
    return [(part, False) for part in untimed] + [(part, True) for part in by_data(c for c in grid if id(c) in timed)]


def is_timed(grid_cell: GridCell) -> bool:
    """Whether the cell measures time."""
    try:
        return Cell.of(grid_cell.known_config).depends_on_device
    except (OSError, ValueError, ImportError):
        return False  # it will fail when it runs


def run_part(part: Part) -> Part:
    """Run the cells of a part after one data pass for all of them; return them with their records."""
    share_data_pass(part)
    run_cells(part)
    return part


def run_grids(grids: Iterable[list[GridCell]], pool: Executor, num_workers: int) -> Iterator[list[GridCell]]:
    """Run the cells of experiments on so many workers; yield each experiment's as soon as all of them are done.

    Experiments are taken one after another, when a worker is free. Parts that measure time come last, alone. Raises
    `BrokenExecutor` if a worker dies.
    """
    left: dict[int, int] = {}
    timed: list[tuple[list[GridCell], Part]] = []
    running: dict[Future, tuple[list[GridCell], Part]] = {}

    def untimed() -> Iterator[tuple[list[GridCell], Part]]:
        for grid in grids:
            parts = parts_of(grid) or [([], False)]
            log.info("%s: %d cells", grid[0].experiment, sum(len(part) for part, _ in parts))
            left[id(grid)] = len(parts)
            timed.extend((grid, part) for part, is_timed in parts if is_timed)
            yield from ((grid, part) for part, is_timed in parts if not is_timed)

    def finish(grid: list[GridCell], part: Part, done: Part) -> bool:
        take_over(part, done)
        if part:
            log.info("%s, %s: done", part[0].experiment, part[0].column)
        left[id(grid)] -= 1
        return not left[id(grid)]

    queue = untimed()
    while True:
        for grid, part in islice(queue, num_workers - len(running)):
            running[pool.submit(run_part, part)] = grid, part
        if not running:
            break
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            grid, part = running.pop(future)
            if finish(grid, part, future.result()):
                yield grid
    for grid, part in timed:
        if finish(grid, part, pool.submit(run_part, part).result()):
            yield grid


def take_over(part: Part, done: Part) -> None:
    """Set the records and states of cells that another process has run."""
    for cell, result in zip(part, done, strict=True):
        cell.record, cell.status = result.record, result.status


class ThisProcess(Executor):
    """A worker that does its work when it is submitted, in this process."""

    def submit(self, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        future.set_result(task(*args, **kwargs))
        return future


def local_pool(num_workers: int, device: str) -> Executor:
    """Processes of this machine; for one worker, this process alone. On the `device` cuda, GPUs take turns."""
    if num_workers == 1:
        return ThisProcess()
    context = multiprocessing.get_context("spawn")
    gpus, names = context.SimpleQueue(), visible_gpus() if device == "cuda" else [None]
    for number in range(num_workers):
        gpus.put(names[number % len(names)])
    logging_config = OmegaConf.to_container(HydraConfig.get().job_logging)
    return ProcessPoolExecutor(num_workers, context, _begin, (logging_config, Path.cwd(), gpus))


def number_of_workers(wanted: int | None) -> int:
    """As many as wanted, or as there are processors."""
    return wanted or os.cpu_count() or 1


def visible_gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]


def _begin(logging_config: Any, folder: Path, gpus: SimpleQueue) -> None:
    """Prepare a process: it ends with its parent, has a GPU of its own, and logs and sees paths as its parent does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if gpu := gpus.get():
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before CUDA is initialised
    os.chdir(folder)
    hide_displays()
    logging.config.dictConfig(logging_config)


def _end_with_parent() -> None:
    """A killed parent cannot stop its workers, which would wait for work forever."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def has_launcher() -> bool:
    """Whether `hydra/launcher=` chooses another launcher than Hydra's default."""
    return not HydraConfig.get().launcher["_target_"].endswith("BasicLauncher")


def launch(grids: Iterable[list[GridCell]]) -> list[list[GridCell]]:
    """Run the cells of experiments as jobs of Hydra's launcher, one for each part; those that measure time alone."""
    grids, overrides = list(grids), HydraConfig.get().overrides
    given = [override for override in overrides.task if not override.startswith("experiment=")]
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=HydraContext(hydra.config_loader, hydra.callbacks),
        task_function=run_job,
        config=hydra.compose_config(
            HydraConfig.get().job.config_name,
            [*overrides.hydra, *overrides.task],
            RunMode.MULTIRUN,
            with_log_configuration=False,
        ),
    )
    jobs, alone = [], []
    for grid in grids:
        for number, (part, is_timed) in enumerate(parts_of(grid)):
            chosen = part[0].known_config.experiment
            job = part, [*given, f"experiment={chosen.option or chosen.name}", f"part={number}"]
            (alone if is_timed else jobs).append(job)
    for batch in filter(None, [jobs, *([job] for job in alone)]):
        done = launcher.launch([job for _, job in batch], initial_job_idx=0)
        for (part, _), result in zip(batch, done, strict=True):
            take_over(part, result.return_value)
    return grids


def run_job(config: DictConfig) -> Part:
    """Run one part of an experiment, by number: the task of a launcher's job."""
    os.chdir(HydraConfig.get().runtime.cwd)
    hide_displays()
    (experiment,) = chosen_experiments(config)
    part, _ = parts_of(grid_of(experiment))[config.part]
    return run_part(part)
