"""The JSON record of one cell: the truth about what was run, on what, and what came out."""

import importlib.metadata
import json
import logging
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from facts.files import replacing
from facts.version import __version__

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[1]
WORK = ("decomposition", "search", "pruning", "finetuning")  # stages that make the network
PACKAGES = ("torch", "torchvision", "timm", "numpy", "scipy", "scikit-learn", "hydra-core", "pydantic", "safetensors")


@cache
def versions() -> dict[str, str]:
    return {
        "facts": __version__,
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in PACKAGES},
    }


@cache
def machine() -> dict[str, str]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "platform": platform.platform(),
        "processor": processor(),
        "gpu": gpu,
        "threads": str(torch.get_num_threads()),
    }


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


@cache
def git_state() -> dict[str, Any]:
    """Commit, and whether the working tree differs from it outside `results/`; empty outside a git checkout."""
    try:
        sha = _git("rev-parse", "HEAD")
        return {"sha": sha, "dirty": bool(_git("status", "--porcelain", "--", ".", ":!results"))}
    except (OSError, subprocess.CalledProcessError):
        return {}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


@dataclass(frozen=True)
class Record:
    """One cell. `metrics` and `plan` are empty and `error` tells why where `status` is `failed`.

    `spent`, `budget`, `latency`, `solution` and `profile` say what the rank search rests on, as in `facts.Summary`;
    `analysis` holds the values that an analysis found, beside its metrics. `weights` names the file that the network's
    weights came from, with its SHA-256; `model_hash` is of what was in it.
    """

    fingerprint: str
    status: Literal["done", "failed"]
    config: dict[str, Any]
    model_hash: str
    data_hash: str
    metrics: dict[str, float] = field(default_factory=dict)
    plan: dict[str, int | None] = field(default_factory=dict)
    repaired: dict[str, int] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)
    budget: dict[str, float] = field(default_factory=dict)
    latency: dict[str, float] = field(default_factory=dict)
    solution: dict[str, Any] | None = None
    profile: dict[str, list[list[float]]] = field(default_factory=dict)
    analysis: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    attempt: int = 1
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    versions: dict[str, str] = field(default_factory=lambda: versions())
    git: dict[str, Any] = field(default_factory=lambda: git_state())
    machine: dict[str, str] = field(default_factory=lambda: machine())

    @property
    def figures(self) -> dict[str, float]:
        """What a table can show: the metrics, and the minutes of the search and of the whole compression."""
        work = [self.seconds[stage] / 60 for stage in WORK if stage in self.seconds]
        figures = {**self.metrics, **({"total_minutes": sum(work)} if work else {})}
        return figures | ({"search_minutes": self.seconds["search"] / 60} if "search" in self.seconds else {})


def write_record(record: Record, folder: Path) -> None:
    with replacing(folder / f"{record.fingerprint}.json") as path:
        path.write_text(json.dumps(asdict(record), indent=1))


def read_record(fingerprint: str, folder: Path) -> Record | None:
    try:
        return Record(**json.loads((folder / f"{fingerprint}.json").read_text()))
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, TypeError) as error:
        log.warning("the record %s is damaged (%s): its cell is run again", fingerprint, error)
        return None
