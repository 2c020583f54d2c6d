"""Errors of the operating system at the k-th operation on files below a folder.

Python reports each such operation to audit hooks, before it is made; a hook that raises makes it fail. A hook cannot be
removed, so there is one for the process, and it sleeps where nothing is to fail.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate", "os.link")


@dataclass
class Fault:
    """At operation number `at` below `folder`, from 0 on, the error `number` is raised; `count` are those seen."""

    folder: Path
    at: int | None
    number: int
    count: int = 0

    def meet(self, event: str, arguments: tuple) -> None:
        path = arguments[0] if arguments else None
        if event not in OPERATIONS or not isinstance(path, str | os.PathLike):
            return
        if not Path(path).is_relative_to(self.folder):
            return
        self.count += 1
        if self.at == self.count - 1:
            raise OSError(self.number, os.strerror(self.number), str(path))


_active: list[Fault] = []
_hooked = False


def _hook(event: str, arguments: tuple) -> None:
    if _active:
        fault = _active[0]
        _active.clear()  # what the fault itself does with paths is not counted
        try:
            fault.meet(event, arguments)
        finally:
            _active.append(fault)


@contextmanager
def failing(folder: Path, at: int | None, number: int) -> Iterator[Fault]:
    """Have operation `at` below `folder` fail within the block; None: none, and they are counted."""
    global _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    _active.append(Fault(folder, at, number))
    try:
        yield _active[0]
    finally:
        _active.clear()
