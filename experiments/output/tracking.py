"""Weights & Biases as a mirror of the records: offline by default, and never a reason to fail."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.config import Tracking

log = logging.getLogger(__name__)


@contextmanager
def tracked(
    tracking: Tracking, folder: Path, run_id: str, **init: Any
) -> Iterator[Callable[[Callable[[Any], None]], None]]:
    """Open a W&B run for the block; yields a function that calls its argument on the run, if there is one."""
    run = None
    if tracking.mode != "disabled":
        run = _guarded("start", lambda: _start(tracking, folder, run_id, init))
    exit_code = 1
    try:
        yield lambda action: _guarded("log", lambda: action(run)) if run else None
        exit_code = 0
    finally:
        if run:
            _guarded("finish", lambda: run.finish(exit_code))


def _start(tracking: Tracking, folder: Path, run_id: str, init: dict[str, Any]) -> Any:
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, init_timeout=30)
    return wandb.init(
        project=tracking.project,
        mode=tracking.mode,  # type: ignore[arg-type]  # W&B checks it
        dir=str(folder),
        id=run_id,
        settings=settings,
        reinit="create_new",
        **init,
    )


def _guarded(what: str, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:  # a failure here must not lose the record
        log.warning("W&B could not %s (%s: %s); the run goes on without it", what, type(error).__name__, error)
        return None
