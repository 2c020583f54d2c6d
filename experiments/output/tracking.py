"""Weights & Biases as a mirror of the records: offline by default, one run of an id, and never a reason to fail."""

import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.config import Tracking, in_a_line
from experiments.record import Record

log = logging.getLogger(__name__)

MOST_CHARACTERS = 64  # of a tag


@contextmanager
def tracked(
    tracking: Tracking, folder: Path, run_id: str, tags: Iterable[str], **init: Any
) -> Iterator[Callable[[Callable[[Any], None]], None]]:
    """Open a W&B run for the block; yield a function that calls its argument on the run, if there is one."""

    def start() -> Any:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, init_timeout=30)
        where: dict[str, Any] = {name: getattr(tracking, name) for name in ("mode", "project", "entity")}
        init["tags"] = [tag[:MOST_CHARACTERS] for tag in tags]
        return wandb.init(dir=str(folder), id=run_id, settings=settings, reinit="create_new", **where, **init)

    run = _guarded("start", start) if tracking.mode != "disabled" else None
    exit_code = 1
    try:
        yield lambda action: _guarded("log", lambda: action(run)) if run else None
        exit_code = 0
    finally:
        if run:
            _guarded("finish", lambda: run.finish(exit_code))
            runs = sorted(folder.glob(f"wandb/offline-run-????????_??????-{run_id}"))
            for older in runs[:-1]:  # a sync would upload them, too
                shutil.rmtree(older, ignore_errors=True)


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


def log_record(run: Any, record: Record) -> None:
    """Log metrics, timings and the plan of a record as a W&B summary and table."""
    import wandb

    seconds = {f"seconds/{stage}": seconds for stage, seconds in record.seconds.items()}
    repaired = sum(record.summary.repaired.values()) if record.summary else 0
    run.summary.update({**record.metrics, **seconds, "repaired": repaired})
    run.log({"plan": wandb.Table(columns=["layer", "rank"], data=[list(item) for item in record.plan.items()])})
