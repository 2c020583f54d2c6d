"""Check that a run can succeed, as `experiments.reproduce` does before it starts: `python -m experiments.doctor`."""

import hydra
from omegaconf import DictConfig
from rich.console import Console

from experiments.checks import examine, show_findings
from experiments.config import CONF
from experiments.grid import chosen_experiments, samples_of
from experiments.runner import started


@hydra.main(version_base="1.3", config_path=CONF, config_name="reproduce")
def main(config: DictConfig) -> None:
    with started():
        if show_findings(examine(config, samples_of(chosen_experiments(config))), Console()):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
