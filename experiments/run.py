"""Run one cell: `python -m experiments.run model=deit_b estimator=facts ratio=0.5`, or a sweep with `-m`."""

import logging

import hydra
from omegaconf import DictConfig

from experiments.config import CONF, OF_TABLES, given_overrides

log = logging.getLogger(__name__)


@hydra.main(version_base="1.3", config_path=CONF, config_name="run")
def main(config: DictConfig) -> None:
    # Imported here: PyTorch takes seconds to load, and completion need not wait.
    from experiments.runner import open_cell, run_cell, started

    with started():
        if given := sorted({override.key_or_group for override in given_overrides()} & OF_TABLES):
            raise ValueError(f"a cell has no {', '.join(given)}: use experiments.reproduce, which makes tables")
        record = run_cell(open_cell(config))
    log.info("%s: %s", record.fingerprint, ", ".join(f"{name} {value:.4g}" for name, value in record.metrics.items()))


if __name__ == "__main__":
    main()
