"""Protocol of launchers."""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol

Prepare = Callable[[], None]
"""To be called in each process before its first task."""


class Launcher(Protocol):
    """A place where tasks run; all of them see the results folder."""

    def executor(self, num_tasks: int, prepare: Prepare) -> Executor:
        """An executor of so many tasks at a time, in processes that are prepared. It ends them when it is closed."""
