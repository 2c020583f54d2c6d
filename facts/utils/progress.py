"""Progress bars and timing of long work."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import track

from facts.utils import distributed


def with_progress(batches: Iterable, what: str) -> Iterable:
    """Yield the batches with a transient progress bar on the main rank."""
    return track(batches, what, transient=True, console=Console(stderr=True), disable=not distributed.is_main_rank())


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the block's wall time to `seconds[stage]`."""
    start = time.perf_counter()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start
