"""Run one cell: `python -m experiments.run model=deit_b estimator=facts ratio=0.5`, or a sweep with `-m`."""

import logging

import hydra
from omegaconf import DictConfig

from experiments.config import CONF

log = logging.getLogger(__name__)


@hydra.main(version_base="1.3", config_path=CONF, config_name="run")
def main(config: DictConfig) -> None:
    # Imported here: PyTorch takes seconds to load, and completion and sweeps that submit jobs need not wait.
    from experiments.runner import open_cell, run_cell, started

    with started():
        if config.experiment:
            name = config.experiment.name
            raise ValueError(f"a cell has no experiment={name}, which is a table: use experiments.reproduce for it")
        record = run_cell(open_cell(config))
    log.info("%s: %s", record.fingerprint, ", ".join(f"{name} {value:.4g}" for name, value in record.metrics.items()))


if __name__ == "__main__":
    main()
