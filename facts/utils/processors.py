"""Processors of this machine."""

import os

MOST_WORKERS = 16


def loader_workers(wanted: int | None) -> int:
    """Worker processes of a loader: as wanted, or one for each processor, up to 16."""
    if wanted is not None:
        return wanted
    return min(MOST_WORKERS, getattr(os, "process_cpu_count", os.cpu_count)() or 1)  # the former since Python 3.13
