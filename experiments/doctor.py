"""Check that a run can succeed: `python -m experiments.doctor`, with the options of `experiments.reproduce`."""

import hydra
from omegaconf import DictConfig
from rich.console import Console

from experiments.config import CONF
from experiments.first_contact import first_contact
from experiments.grid import by_data, chosen_experiments, grid_of
from experiments.preflight import configs_of, preflight, show_findings


@hydra.main(version_base="1.3", config_path=CONF, config_name="reproduce")
def main(config: DictConfig) -> None:
    grid = [cell for experiment in chosen_experiments(config) for cell in grid_of(experiment)]
    columns, console = configs_of(by_data(grid)), Console()
    findings = preflight(columns)
    show_findings(findings, console)
    works = first_contact(columns, console) if config.deep else True
    if not works or any(finding.level == "problem" for finding in findings):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
