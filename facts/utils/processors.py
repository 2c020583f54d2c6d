"""Processors of this machine."""

import os
import platform
from pathlib import Path

import torch

MOST_WORKERS = 16


def device_name(device: torch.device) -> str:
    """Name of a GPU, or of this machine's processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def processor() -> str:
    """Name of this machine's processor, or its architecture if no name is known."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def loader_workers(wanted: int | None) -> int:
    """Number of workers for a loader: as wanted, or this process's share of the processors, up to 16."""
    if wanted is not None:
        return wanted
    able = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_WORKERS, able // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))  # set by torchrun
