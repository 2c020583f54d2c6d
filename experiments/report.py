"""Draw existing results again, and the report: `python -m experiments.report [profile=NAME] [results=FOLDER]`.

With `experiment=NAME`, only its table and figure, and from the records of cells, as after the jobs of a launcher.
"""

from omegaconf import DictConfig
from rich.console import Console

from experiments.cell import cells_of, recall, results_folder
from experiments.compose import command, given_overrides
from experiments.grid import chosen_experiments
from experiments.output.results import draw_again, report_on_all, show
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
            for experiment in chosen_experiments(config):
                cells = cells_of(experiment)
                recall(cells, folder / "records")
                if any(cell.record for cell in cells):
                    show(experiment, cells, folder, config, Console())
                else:
                    print(f"{experiment.name} stays as it is: none of its cells has run with these settings")
        else:
            draw_again(folder)
        report_on_all(folder)
        print(folder / "report.html")


if __name__ == "__main__":
    main()
