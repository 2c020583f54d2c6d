"""Turns on one machine: cells run side by side, but alone while one of them measures time."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import ReadWriteLock

from facts.utils import distributed
from facts.utils.files import writable_folder

_shared: ReadWriteLock | None = None


@contextmanager
def beside_others(folder: Path) -> Iterator[None]:
    """Run the block beside those of this machine's other processes, but not beside their measurements.

    Processes of torchrun are one worker, which has no others.
    """
    global _shared
    if distributed.size() > 1:
        yield
        return
    _shared = ReadWriteLock(writable_folder(folder / "locks") / f"{platform.node()}.db")
    try:
        with _shared.read_lock():
            yield
    finally:
        _shared = None


@contextmanager
def alone() -> Iterator[None]:
    """Run a part of such a block when no other process is within its own; at once outside of one, or within itself."""
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
