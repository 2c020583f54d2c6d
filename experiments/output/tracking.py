"""Weights & Biases as a mirror of the records: offline by default, and never a reason to fail."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from experiments.config import USER_ERRORS, Tracking, in_a_line

if TYPE_CHECKING:  # Hydra imports this file at every start, which need not wait for PyTorch
    from experiments.record import Record

log = logging.getLogger(__name__)

OF_PLACES = ("results=", "tracking")  # overrides that change no result
MOST_CHARACTERS = 128  # in the name of a group


@contextmanager
def tracked(
    tracking: Tracking, folder: Path, run_id: str, **init: Any
) -> Iterator[Callable[[Callable[[Any], None]], None]]:
    """Open a W&B run for the block; yield a function that calls its argument on the run, if there is one."""

    def start() -> Any:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, init_timeout=30)
        where: dict[str, Any] = {name: getattr(tracking, name) for name in ("mode", "project", "entity")}
        return wandb.init(dir=str(folder), id=run_id, settings=settings, reinit="create_new", **where, **init)

    run = _guarded("start", start) if tracking.mode != "disabled" else None
    exit_code = 1
    try:
        yield lambda action: _guarded("log", lambda: action(run)) if run else None
        exit_code = 0
    finally:
        if run:
            _guarded("finish", lambda: run.finish(exit_code))


def _guarded(what: str, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:  # a failure here must not lose the record
        reason = f"{type(error).__name__}: {in_a_line(error)}"
        log.warning("W&B could not %s (%s); the run goes on without it", what, reason)
        return None


def log_stage(run: Any, stage: str, values: dict[str, float]) -> None:
    """Log a stage that has ended, or an epoch of it, as a step of the W&B history."""
    run.log({"stage": stage, **{f"{name}/{stage}": value for name, value in values.items()}})


def log_record(run: Any, record: "Record") -> None:
    """Log metrics, timings and the plan of a record as a W&B summary and table."""
    import wandb

    seconds = {f"seconds/{stage}": seconds for stage, seconds in record.seconds.items()}
    run.summary.update({**record.metrics, **seconds, "repaired": record.num_repaired})
    run.log({"plan": wandb.Table(columns=["layer", "rank"], data=[list(item) for item in record.plan.items()])})


class GroupRuns(Callback):
    """Name the group of a sweep after its overrides, so that a restarted one joins it; check and show its runs."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        from experiments.plan import jobs_of, sweep_of

        overrides = config.hydra.overrides
        try:
            (sweep_of if kwargs["config_name"] == "run" else jobs_of)(overrides.task)
        except USER_ERRORS as error:
            raise SystemExit(f"error: {in_a_line(error)}") from error  # Hydra makes warnings of other exceptions
        if any(override.startswith("part=") for override in overrides.task):
            return  # the cells of tables are grouped by experiment
        # Hydra applies these in every job, before the job's own overrides, which may include `tracking.group`.
        overrides.hydra.append(f"tracking.group='{group_of(overrides.task)}'")

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if kwargs["config_name"] == "run":
            from rich.console import Console

            from experiments.plan import show_sweep

            show_sweep(config.hydra.overrides.task, Console())


def group_of(overrides: list[str]) -> str:
    """Join the overrides of a sweep in one line, without characters that Hydra or W&B would interpret."""
    line = " ".join(override for override in overrides if not override.startswith(OF_PLACES))
    name = re.sub(r"[^\w .,:=/+~@()*-]", "_", line)
    ending = f"... {crc32(line.encode()):08x}"
    return name if len(name) <= MOST_CHARACTERS else name[: MOST_CHARACTERS - len(ending)] + ending
