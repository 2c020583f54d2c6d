"""Whether a run can go through: `python -m experiments.doctor`, with the choices that `experiments.reproduce` takes."""

import hydra
from omegaconf import DictConfig
from rich.console import Console

from experiments.config import CONF
from experiments.examination import examine, show_findings
from experiments.reproduce import by_data, chosen_experiments, places_of


@hydra.main(version_base="1.3", config_path=CONF, config_name="reproduce")
def main(config: DictConfig) -> None:
    places = [place for experiment in chosen_experiments(config) for place in places_of(experiment)]
    findings = examine([[place.config for place in column if place.config] for column in by_data(places)])
    show_findings(findings, Console())
    if any(finding.level == "problem" for finding in findings):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
