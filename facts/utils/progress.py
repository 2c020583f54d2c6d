"""Progress of long work: a bar in the running stage's row on a terminal, lines in the log elsewhere."""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from operator import length_hint
from typing import Protocol, TypeVar

from facts.utils.stopwatch import current_stopwatch, new_display

log = logging.getLogger(__name__)
T = TypeVar("T")

SECONDS = 30.0  # between two lines of the log


class Show(Protocol):
    """Function that shows how much is done, of the total if that is known."""

    def __call__(self, done: int, total: int | None, note: str = "") -> None: ...


def with_progress(batches: Iterable[T], what: str) -> Iterator[T]:
    """Yield the batches, and show how many are done."""
    total = length_hint(batches) or None
    with progress_of(what) as show:
        for done, batch in enumerate(batches):
            show(done, total)
            yield batch


@contextmanager
def progress_of(what: str) -> Iterator[Show]:
    """Yield a function that shows how much is done: at once on a terminal, elsewhere in a line every 30 seconds."""
    watch = current_stopwatch()
    if watch and watch.display and watch.running:
        name = watch.running if watch.running == what else f"{watch.running}: {what}"
        yield lambda done, total, note="": watch.show(name, done, total, note)
    elif display := new_display():
        with display:
            row = display.add_task(what, total=None, note="")
            yield lambda done, total, note="": display.update(row, completed=done, total=total, note=note)
    else:
        yield _in_lines(what)


def _in_lines(what: str) -> Show:
    start = last = time.monotonic()
    first: int | None = None  # resumed work starts above 0

    def show(done: int, total: int | None, note: str = "") -> None:
        nonlocal last, first
        first = done if first is None else first
        if done > first and time.monotonic() - last >= SECONDS:
            last = time.monotonic()
            each = (last - start) / (done - first)
            left = f"{timedelta(seconds=round(each * (total - done)))} left" if total else ""
            counts = f"{what}: {done} of {total}" if total else f"{what}: {done}"
            log.info("%s", ", ".join(filter(None, [counts, note, left])))

    return show
