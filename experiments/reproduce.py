"""Reproduce tables and figures: `python -m experiments.reproduce [experiment=NAME|all] [profile=mini|paper]`.

Runs the cells that are not done, then writes the output. Finished cells never run again, and cells of another process
are left to it: several processes, also on machines that share the results, share the work.
"""

import logging

import hydra
from omegaconf import DictConfig
from rich.console import Console

from experiments.cell import results_folder
from experiments.columns import run_column
from experiments.config import CONF
from experiments.grid import by_data, chosen_experiments, grid_of
from experiments.output.results import show_results
from experiments.plan import show_plan
from experiments.preflight import look_first
from facts.utils import distributed
from facts.utils.files import writable_folder

log = logging.getLogger(__name__)


@hydra.main(version_base="1.3", config_path=CONF, config_name="reproduce")
def main(config: DictConfig) -> None:
    distributed.join()
    folder, console = writable_folder(results_folder(config)), Console()
    experiments = chosen_experiments(config)
    grid = [cell for experiment in experiments for cell in grid_of(experiment)]
    left_out = sum(cell.config is None for cell in grid)
    log.info("%d experiments, %d cells, %d of them left out", len(experiments), len(grid), left_out)
    if config.plan:
        distributed.on_main_rank(lambda: show_plan(experiments, grid, config, console))
        return
    columns = by_data(grid)
    distributed.on_main_rank(lambda: look_first(columns, config.force, console))
    for number, column in enumerate(columns, start=1):
        log.info("%s, %d cells (%d of %d)", column[0].known_config.model.name, len(column), number, len(columns))
        run_column(column)
    distributed.on_main_rank(lambda: show_results(experiments, grid, folder, config, console))
    if failed := [cell for cell in grid if cell.status == "failed"]:
        raise SystemExit(f"{len(failed)} of {len(grid)} cells failed; their records say why. Run again to retry them.")


if __name__ == "__main__":
    main()
