"""Progress bars and timing of long work."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import track

from facts.utils import distributed

_hidden = False


def hide_progress() -> None:
    """Show no bar from now on: one terminal has no room for those of several processes."""
    global _hidden
    _hidden = True


def with_progress(batches: Iterable, what: str) -> Iterable:
    """Yield the batches with a transient progress bar, on the main rank and a terminal alone."""
    console = Console(stderr=True)
    shown = distributed.is_main_rank() and console.is_terminal and not _hidden
    return track(batches, what, transient=True, console=console, disable=not shown)


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the block's wall time to `seconds[stage]`."""
    start = time.perf_counter()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start
