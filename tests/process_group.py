"""Processes of a group of their own, which are killed together."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from experiments.config import CONF


@contextmanager
def process_group(command: list[Any], log: IO[str]) -> Iterator[subprocess.Popen]:
    """Run a command on one thread with its output in a log; what is left of it at the end is killed."""
    streams = {"stderr": subprocess.STDOUT, "start_new_session": True, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    with subprocess.Popen(command, cwd=Path(CONF).parent, stdout=log, **streams) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
