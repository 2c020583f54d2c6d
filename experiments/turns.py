"""Turns on one machine: cells run side by side, but alone while one of them measures time."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import ReadWriteLock

_shared: ReadWriteLock | None = None


@contextmanager
def beside_others(folder: Path) -> Iterator[None]:
    """Run the block beside those of this machine's other processes, but not beside their measurements."""
    global _shared
    _shared = ReadWriteLock(folder / "locks" / f"{platform.node()}.db")
    try:
        with _shared.read_lock():
            yield
    finally:
        _shared = None


@contextmanager
def alone() -> Iterator[None]:
    """Run a part of such a block when no other process is within its own; at once outside of one."""
    if _shared is None:
        yield
        return
    _shared.release()
    try:
        with _shared.write_lock():
            yield
    finally:
        _shared.acquire_read()
