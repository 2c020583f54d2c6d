"""A lock of this machine: cells run side by side, but a cell that measures time runs on its own."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import ReadWriteLock

from facts.utils.files import writable_folder

_shared: ReadWriteLock | None = None


@contextmanager
def beside_others(folder: Path) -> Iterator[None]:
    """Run the block alongside this machine's other processes, but not during their measurements."""
    global _shared
    _shared = ReadWriteLock(writable_folder(folder / "locks") / f"{platform.node()}.db")
    try:
        with _shared.read_lock():
            yield
    finally:
        _shared = None


@contextmanager
def alone() -> Iterator[None]:
    """Run part of a `beside_others` block while no other process is in its own; outside one or nested, do not wait."""
    global _shared
    if _shared is None:
        yield
        return
    lock, _shared = _shared, None
    lock.release()
    try:
        with lock.write_lock():
            yield
    finally:
        lock.acquire_read()
        _shared = lock
