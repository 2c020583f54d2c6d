"""Run one cell: `python -m experiments.run model=deit_b estimator=facts ratio=0.5`, or a sweep with `-m`.

Functions import what needs PyTorch, which takes seconds: completion and help need not wait.
"""

import logging
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from experiments.compose import announce_loading, command, format_error, given_overrides, jobs_of
from experiments.config import OF_TABLES, USER_ERRORS

log = logging.getLogger(__name__)


@command("run")
def main(config: DictConfig) -> None:
    announce_loading()
    from experiments.cell import Cell
    from experiments.runner import run_cell, started

    with started():
        if given := sorted({override.key_or_group for override in given_overrides()} & OF_TABLES):
            raise ValueError(f"a cell has no {', '.join(given)}: use experiments.reproduce, which makes tables")
        record = run_cell(Cell(config))
    log.info("%s: %s", record.fingerprint, ", ".join(f"{name} {value:.4g}" for name, value in record.metrics.items()))


class CheckedSweep(Callback):
    """Check the runs of a sweep before the first one starts, and show them at its end."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        from experiments.plan import sweep_of

        try:
            jobs = jobs_of(config.hydra.overrides.task)
            self.cells = sweep_of(jobs) if kwargs["config_name"] == "run" else {}
        except USER_ERRORS as error:
            raise SystemExit(format_error(error)) from error  # Hydra makes warnings of other exceptions

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from rich.console import Console

        from experiments.plan import show_sweep

        if self.cells:
            show_sweep(self.cells, Console())


if __name__ == "__main__":
    main()
