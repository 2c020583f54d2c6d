"""Processors of this machine."""

import os

MOST_WORKERS = 16


def loader_workers(wanted: int | None) -> int:
    """Worker processes of a loader: as wanted, or a process's share of the processors, up to 16."""
    if wanted is not None:
        return wanted
    able = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_WORKERS, able // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))  # which torchrun sets
