"""Run one cell: `python -m experiments.run model=deit_b estimator=facts ratio=0.5`, or a sweep with `-m`.

Functions import what needs PyTorch, which takes seconds: completion and help need not wait.
"""

import logging
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from experiments.config import OF_TABLES, USER_ERRORS, command, given_overrides, say_what_takes_seconds, told

log = logging.getLogger(__name__)


@command("run")
def main(config: DictConfig) -> None:
    say_what_takes_seconds()
    from experiments.runner import open_cell, run_cell, started

    with started():
        if given := sorted({override.key_or_group for override in given_overrides()} & OF_TABLES):
            raise ValueError(f"a cell has no {', '.join(given)}: use experiments.reproduce, which makes tables")
        record = run_cell(open_cell(config))
    log.info("%s: %s", record.fingerprint, ", ".join(f"{name} {value:.4g}" for name, value in record.metrics.items()))


class CheckedSweep(Callback):
    """Check the runs of a sweep before the first one starts, and show them at its end."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        from experiments.plan import jobs_of, sweep_of

        try:
            (sweep_of if kwargs["config_name"] == "run" else jobs_of)(config.hydra.overrides.task)
        except USER_ERRORS as error:
            raise SystemExit(told(error)) from error  # Hydra makes warnings of other exceptions

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if kwargs["config_name"] == "run":
            from rich.console import Console

            from experiments.plan import show_sweep

            show_sweep(config.hydra.overrides.task, Console())


if __name__ == "__main__":
    main()
