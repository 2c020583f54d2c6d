"""Rewrite the report from existing results: `python -m experiments.report [profile=NAME] [results=FOLDER]`.

With `experiment=NAME`, its table and figure are first drawn from the records, as after the jobs of a launcher.
"""

from omegaconf import DictConfig
from rich.console import Console

from experiments.cell import Cell, results_folder
from experiments.config import Experiment, command, given_overrides
from experiments.grid import GridCell, chosen_experiments, grid_of
from experiments.output.results import report_on_all, show
from experiments.plan import latest_records, recorded
from experiments.record import Record
from experiments.runner import started
from facts.utils.files import writable_folder


@command("reproduce")
def main(config: DictConfig) -> None:
    with started():
        folder = results_folder(config)
        if not folder.is_dir():
            raise ValueError(f"no folder {folder}: choose another with results=, or run experiments.reproduce first")
        writable_folder(folder)
        if any(override.key_or_group == "experiment" for override in given_overrides()):
            records = latest_records(folder / "records")
            for experiment in chosen_experiments(config):
                grid = recorded_grid(experiment, records)
                if any(cell.record for cell in grid):
                    show(experiment, grid, folder, config, Console())
                else:
                    print(f"{experiment.name} stays as it is: none of its cells has run with these settings")
        report_on_all(folder)
        print(folder / "report.html")


def recorded_grid(experiment: Experiment, records: dict[str, Record]) -> list[GridCell]:
    """Make the experiment's cells with their records, without their networks or data."""
    grid = grid_of(experiment)
    for cell in grid:
        if cell.config and (record := recorded(Cell.of(cell.config), records)):
            cell.record, cell.status = record, record.status
    return grid


if __name__ == "__main__":
    main()
