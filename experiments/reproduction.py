"""Tables and figures of experiments: their cells run, then each is drawn; or the plan, or one part alone."""

import gc
from itertools import chain

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console

from experiments.cell import Cell, by_data, cells_of, results_folder
from experiments.config import Experiment
from experiments.doctor import look_first
from experiments.grid import chosen_experiments, warn_of_misspelt_metrics
from experiments.output.results import DRAWINGS, report_on_all, show
from experiments.plan import show_plan
from experiments.workers import finished, run_part
from facts.utils.distributed import num_processors
from facts.utils.files import writable_folder
from facts.utils.progress import hide_displays


def reproduce(config: DictConfig) -> None:
    """Make the tables and figures, each drawn when its cells are done; or show the plan; or run only one part."""
    console = Console()
    if config.workers is not None and config.workers < 1:
        raise ValueError(f"workers must be at least 1, or null for one per processor, got {config.workers}")
    chosen = list(chosen_experiments(config))
    if unknown := {experiment.figure for experiment in chosen} - {"", *DRAWINGS}:
        raise ValueError(f"no figure is called {', '.join(unknown)}; there are {', '.join(DRAWINGS)}")
    warn_of_misspelt_metrics(chosen)
    folder = results_folder(config)
    gc.disable()  # cells stay: to look for garbage among them takes a fifth of the plan's time
    try:
        experiments = [cells_of(experiment) for experiment in chosen]  # each as its cells
        if config.plan:
            return show_plan(chosen, experiments, folder, console)
    finally:
        gc.enable()
    writable_folder(folder)
    if config.part is not None:
        return run_alone(parts_of(experiments), config, console)
    if HydraConfig.get().mode == RunMode.RUN and not HydraConfig.get().launcher["_target_"].endswith("BasicLauncher"):
        count = len(parts_of(experiments))
        raise ValueError(f"hydra/launcher= runs parts of tables as jobs: add -m 'part=range({count})'")
    console.print(f"{len(chosen)} tables and figures: first checking what they need")
    cells = [*chain.from_iterable(experiments)]
    look_first(config, cells, console)
    drawings = [each for pair in zip(chosen, experiments, strict=True) for each in drawings_of(*pair)]
    done = finished([run for _, _, run in drawings], config.workers or num_processors(), config.hardware.device)
    for (experiment, shown, _), _ in zip(drawings, done, strict=True):
        show(experiment, shown, folder, config, console)
    report_on_all(folder)
    console.print(f"Tables and figures: {folder}; report: {folder / 'report.html'}", soft_wrap=True, markup=False)
    if failure := failure_of(cells):
        raise SystemExit(failure)


def drawings_of(experiment: Experiment, cells: list[Cell]) -> list[tuple[Experiment, list[Cell], list[Cell]]]:
    """List when a table is drawn: the cells that it shows, and those that run before. First it shows one draw alone."""
    first, others = ([cell for cell in cells if bool(cell.draw) == later] for later in (False, True))
    if not any(cell.is_left for cell in others):
        return [(experiment, cells, cells)]
    return [(experiment, first, first), (experiment, cells, others)]


def parts_of(tables: list[list[Cell]]) -> list[list[Cell]]:
    """The parts of all tables: cells that share a network and its data."""
    return [part for cells in tables for part in by_data(cells)]


def run_alone(parts: list[list[Cell]], config: DictConfig, console: Console) -> None:
    """Run one part, by number: a job of Hydra's launchers. `experiments.report` draws the tables."""
    if not 0 <= config.part < len(parts):
        raise ValueError(f"part must be from 0 to {len(parts) - 1}, got {config.part}")
    hide_displays()
    part = parts[config.part]
    look_first(config, part, console)
    if failure := failure_of(run_part(part)):
        raise RuntimeError(failure)


def failure_of(cells: list[Cell]) -> str:
    """Say how many cells failed, and where to read why; empty if none did."""
    failed = [cell for cell in cells if cell.status == "failed"]
    records = [cell.records / cell.record.fingerprint for cell in failed if cell.record]
    where = f"see {records[0]}.json" if records else "the log says why"
    return f"{len(failed)} of {len(cells)} cells failed: {where}. Run again to retry them." if failed else ""
