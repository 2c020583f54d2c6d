"""Times of the stages of long work, and their rows on a terminal."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from facts.utils.reports import report

T = TypeVar("T")

READING = "reading"
_END = object()

_hidden = False


def hide_displays() -> None:
    """Show no displays from now on: a terminal has no room for those of several processes."""
    global _hidden
    _hidden = True


def new_display() -> Progress | None:
    """Make a display that vanishes at the end; None without a terminal. Each row has a field `note`."""
    console = Console(stderr=True)
    if _hidden or not console.is_terminal:
        return None
    return Progress(
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,  # output may go to a file
    )


class Stopwatch:
    """Seconds of each stage, one after another; the running stage; and a display, if there is a terminal."""

    def __init__(self, display: Progress | None):
        self.display, self.running = display, ""
        self.seconds: dict[str, float] = {}
        self.rows: dict[str, TaskID] = {}

    def show(self, description: str, done: int = 0, total: int | None = None, note: str = "") -> None:
        """Show the running stage's progress in its row."""
        if self.display is None:
            return
        if self.running not in self.rows:
            self.rows[self.running] = self.display.add_task(self.running, total=None, note="")
        row = self.rows[self.running]
        self.display.update(row, description=description, completed=done, total=total, note=note)


_current: ContextVar[Stopwatch | None] = ContextVar("_current", default=None)


def current_stopwatch() -> Stopwatch | None:
    return _current.get()


@contextmanager
def stopwatch() -> Iterator[dict[str, float]]:
    """Time the stages within the block, and show them on a terminal. Yields their seconds, updated as they run.

    A block within another one shares its seconds.
    """
    if outer := _current.get():
        yield outer.seconds
        return
    display = new_display()
    with display or nullcontext():
        own = Stopwatch(display)
        token = _current.set(own)
        try:
            yield own.seconds
        finally:
            _current.reset(token)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Time the block as a stage of the running stopwatch, if there is one; within another stage, as a part of that."""
    own = _current.get()
    if own is None or own.running:
        yield
        return
    own.running = name
    own.show(name)
    try:
        with timed(own.seconds, name):
            yield
        own.show(name, 1, 1)
    finally:
        own.running = ""


def waiting(batches: Iterable[T]) -> Iterator[T]:
    """Yield the batches. Time spent waiting for them counts as the stage `reading`, not as the running one."""
    own = _current.get()
    if own is None:
        yield from batches
        return
    iterator, around = iter(batches), own.running
    while True:
        start = time.perf_counter()
        batch = next(iterator, _END)
        waited = time.perf_counter() - start
        own.seconds[READING] = own.seconds.get(READING, 0.0) + waited
        own.seconds[around] = own.seconds.get(around, 0.0) - waited  # `stage` adds the total
        if batch is _END:
            return
        yield batch  # type: ignore[misc]  # not the end


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the block's wall time to `seconds[stage]`, and report it."""
    start = time.perf_counter()
    yield
    taken = time.perf_counter() - start
    seconds[stage] = seconds.get(stage, 0.0) + taken
    report(stage, seconds=taken)
