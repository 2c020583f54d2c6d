"""User errors in one line."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException


@contextmanager
def in_one_line() -> Iterator[None]:
    """End the program with one line for a user error. With HYDRA_FULL_ERROR=1, and in a sweep, raise it in full."""
    try:
        yield
    except (ImportError, MemoryError, OSError, ValueError, OmegaConfBaseException) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1" or HydraConfig.get().mode == RunMode.MULTIRUN:
            raise
        line = "; ".join(map(str.strip, str(error).splitlines()))  # OmegaConf names the place in a line of its own
        raise SystemExit(f"error: {line} (HYDRA_FULL_ERROR=1 shows where)") from error
