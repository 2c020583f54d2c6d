"""Progress of long work: times of its stages, reports to a listener, bars on a terminal, lines in the log."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from io import StringIO
from operator import length_hint
from threading import Event, Thread
from typing import TypeVar

from rich import progress as bars
from rich.console import Console

log = logging.getLogger(__name__)
T = TypeVar("T")

READING = "reading"
SECONDS = 15.0  # between two lines of the log
_END = object()

_hidden = False

Listener = Callable[[str, dict[str, float]], None]
"""Gets a stage's name and what is now known about it: its `seconds` at its end, or the `loss` of an `epoch`."""

_listener: ContextVar[Listener | None] = ContextVar("_listener", default=None)


def report(stage: str, **values: float) -> None:
    """Tell the listener, if there is one, about a stage."""
    if listener := _listener.get():
        listener(stage, values)


@contextmanager
def reporting_to(listener: Listener) -> Iterator[None]:
    """Report the stages within the block to `listener` while they run."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def hide_displays() -> None:
    """Show no displays from now on: a terminal has no room for those of several processes."""
    global _hidden
    _hidden = True


def new_display() -> bars.Progress | None:
    """Make a display that vanishes at the end; None without a terminal. Each row has a field `note`."""
    console = Console(stderr=True)
    if _hidden or not console.is_terminal:
        return None
    return bars.Progress(
        bars.SpinnerColumn(finished_text="✓"),
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[note]}"),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,  # output may go to a file
    )


class Stopwatch:
    """Seconds of each stage, one after another; the running stage; and a display, if there is a terminal."""

    def __init__(self, display: bars.Progress | None):
        self.display, self.running = display, ""
        self.seconds: dict[str, float] = {}
        self.rows: dict[str, bars.TaskID] = {}

    def show(self, description: str, done: int = 0, total: int | None = None, note: str = "") -> None:
        """Show the running stage's progress in its row."""
        if self.display is None:
            return
        if self.running not in self.rows:
            self.rows[self.running] = self.display.add_task(self.running, total=None, note="")
        row = self.rows[self.running]
        self.display.update(row, description=description, completed=done, total=total, note=note)


_current: ContextVar[Stopwatch | None] = ContextVar("_current", default=None)


@contextmanager
def stopwatch() -> Iterator[dict[str, float]]:
    """Time the stages within the block, and show them on a terminal. Yields their seconds, which inner blocks share."""
    if outer := _current.get():
        yield outer.seconds
        return
    display = new_display()
    with display or in_lines("compression"):
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
        with timed(own.seconds, name), nullcontext() if own.display else in_lines(name):
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
        if around:
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


Show = Callable[..., None]
"""Shows how much is done: it takes `done`, the `total` (None if unknown) and a `note`."""


def with_progress(batches: Iterable[T], what: str, name: Callable[[T], str] = lambda _: "") -> Iterator[T]:
    """Yield the batches, and show how many are done, and the `name` of the next."""
    total = length_hint(batches) or None
    with progress_of(what) as show:
        for done, batch in enumerate(batches):
            show(done, total, name(batch))
            yield batch


@contextmanager
def progress_of(what: str) -> Iterator[Show]:
    """Yield a function that shows how much is done: at once on a terminal, elsewhere in a line every 15 seconds."""
    watch = _current.get()
    if watch and watch.display and watch.running:
        name = watch.running if watch.running == what else f"{watch.running}: {what}"
        yield lambda done, total, note="": watch.show(name, done, total, note)
    elif display := new_display():
        with display:
            row = display.add_task(what, total=None, note="")
            yield lambda done, total, note="": display.update(row, completed=done, total=total, note=note)
    else:
        with in_lines(what) as show:
            yield show


@dataclass(eq=False)
class _Work:
    """Work that is running, and how far it was when it was last shown."""

    what: str
    start: float
    first: int | None = None
    shown: float = 0.0
    done: int = 0
    total: int | None = None
    note: str = ""

    def show(self, done: int, total: int | None, note: str = "") -> None:
        self.first = done if self.first is None else self.first  # resumed work starts above 0
        self.shown, self.done, self.total, self.note = time.monotonic(), done, total, note

    def __str__(self) -> str:
        now = time.monotonic()
        time_of = f"{timedelta(seconds=round(now - self.start))} so far"
        if self.total and self.done > (self.first or 0):
            each = (self.shown - self.start) / (self.done - (self.first or 0))
            left = each * (self.total - self.done) - (now - self.shown)
            if round(left) > 0:  # otherwise the rest takes longer than what is done
                time_of = f"{timedelta(seconds=round(left))} left"
        of_total = f"{self.done} of {self.total}" if self.total else str(self.done or "")
        return f"{self.what}: {', '.join(filter(None, [of_total, self.note, time_of]))}"


_in_progress: list[_Work] = []  # the outermost first, whose clock counts; lines are about the last


@contextmanager
def in_lines(what: str) -> Iterator[Show]:
    """Log a line every `SECONDS` while the block runs, by one clock however many stages are in it."""
    own, is_over = _Work(what, time.monotonic()), Event()

    def write() -> None:
        while not is_over.wait(SECONDS):
            works = [*_in_progress]
            if works[:1] == [own] and log.getEffectiveLevel() <= logging.INFO:
                line = str(works[-1])
                log.handle(log.makeRecord(log.name, logging.INFO, "", 0, line, (), None))  # even within `silence`

    _in_progress.append(own)
    Thread(target=write, daemon=True).start()
    try:
        yield own.show
    finally:
        is_over.set()
        _in_progress.remove(own)


@contextmanager
def silence() -> Iterator[None]:
    """Suppress logs, prints and progress bars, such as a library's line per parameter, but not lines of progress."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)
