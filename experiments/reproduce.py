"""Tables and figures of experiments: cells that are done never run again, and several processes share the work."""

import logging
from collections import Counter
from concurrent.futures import BrokenExecutor
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from experiments.cell import results_folder
from experiments.composition import refuse_hidden_files
from experiments.config import CONF
from experiments.doctor import look_first
from experiments.errors import in_one_line
from experiments.grid import chosen_experiments, grid_of
from experiments.output.results import report_on_all, show
from experiments.plan import show_plan
from experiments.workers import launcher_of, number_of_workers, prepare, run_grid
from facts.utils import distributed
from facts.utils.files import writable_folder

log = logging.getLogger(__name__)


@hydra.main(version_base="1.3", config_path=CONF, config_name="reproduce")
def main(config: DictConfig) -> None:
    distributed.join()
    with in_one_line():
        refuse_hidden_files()
        reproduce(config)


def reproduce(config: DictConfig) -> None:
    """Make the tables and figures, or show the plan."""
    folder, console = writable_folder(results_folder(config)), Console()
    experiments = {experiment.name: experiment for experiment in chosen_experiments(config)}
    grid = [cell for experiment in experiments.values() for cell in grid_of(experiment)]
    if config.plan:
        distributed.on_main_rank(lambda: show_plan(list(experiments.values()), grid, config, console))
        return
    distributed.on_main_rank(lambda: look_first(config, grid, console))
    launcher = launcher_of(config)
    left = Counter(cell.experiment for cell in grid if cell.config is not None)
    log.info("%d experiments, %d cells, %d left out", len(experiments), left.total(), len(grid) - left.total())

    def finish(name: str) -> None:
        if not left[name]:
            own = [cell for cell in grid if cell.experiment == name]
            distributed.on_main_rank(lambda: show(experiments[name], own, folder, config, console))

    for name in experiments:
        finish(name)
    workers = number_of_workers(config.workers)
    logging_config = OmegaConf.to_container(HydraConfig.get().job_logging)
    try:
        with launcher.executor(workers, partial(prepare, logging_config, Path.cwd())) as pool:
            for part in run_grid(grid, pool, workers):
                name = part[0].experiment
                left[name] -= len(part)
                log.info("%s, %s: done; %d cells left", name, part[0].known_config.model.title, left.total())
                finish(name)
    except BrokenExecutor as error:
        raise SystemExit(
            f"a worker died, often for lack of memory ({error}): start again, with fewer workers=; what is done is kept"
        ) from error
    distributed.on_main_rank(lambda: report_on_all(folder))
    console.print(f"Tables and figures: {folder}; all of it: {folder / 'report.html'}")
    if failed := [cell for cell in grid if cell.status == "failed"]:
        raise SystemExit(f"{len(failed)} of {len(grid)} cells failed; their records say why. Run again to retry them.")


if __name__ == "__main__":
    main()
