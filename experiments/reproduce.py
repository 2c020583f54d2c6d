"""Draw tables and figures of experiments: cells that are done never run again, and several processes share the work."""

from functools import partial

import hydra
from omegaconf import DictConfig
from rich.console import Console

from experiments.cell import results_folder
from experiments.checks import look_first
from experiments.config import CONF
from experiments.grid import chosen_experiments, grid_of, samples_of
from experiments.output.results import show, update_report
from experiments.plan import show_plan
from experiments.runner import started
from experiments.workers import finished, has_launcher, launch, workers_of
from facts.utils import distributed
from facts.utils.files import writable_folder


@hydra.main(version_base="1.3", config_path=CONF, config_name="reproduce")
def main(config: DictConfig) -> None:
    with started():
        reproduce(config)


def reproduce(config: DictConfig) -> None:
    """Make the tables and figures, or show the plan. Each is drawn when its cells are done."""
    folder, console, on_main_rank = writable_folder(results_folder(config)), Console(), distributed.on_main_rank
    experiments = {experiment.name: experiment for experiment in chosen_experiments(config)}
    grids = map(grid_of, experiments.values())
    if config.plan:
        cells = [cell for grid in grids for cell in grid]
        return on_main_rank(lambda: show_plan([*experiments.values()], cells, config, console))
    if has_launcher() and distributed.size() > 1:
        raise ValueError("torchrun divides every cell among its processes: start it without hydra/launcher=")
    on_main_rank(lambda: console.print(f"{len(experiments)} tables and figures: first checking what they need"))
    on_main_rank(lambda: look_first(config, samples_of(experiments.values()), console))
    cells = []
    num_workers, device = workers_of(config), config.hardware.device
    for grid in launch(grids) if has_launcher() else finished(experiments.values(), num_workers, device):
        cells += grid
        on_main_rank(partial(show, experiments[grid[0].experiment], grid, folder, config, console))
    on_main_rank(lambda: update_report(folder, console))
    console.print(f"Tables and figures: {folder}; report: {folder / 'report.html'}")
    if failed := [cell for cell in cells if cell.status == "failed"]:
        records = [folder / "records" / f"{cell.record.fingerprint}.json" for cell in failed if cell.record]
        where = f"see {records[0]}" if records else "the log says why"
        raise SystemExit(f"{len(failed)} of {len(cells)} cells failed: {where}. Run again to retry them.")


if __name__ == "__main__":
    main()
