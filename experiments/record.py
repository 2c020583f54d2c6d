"""JSON record of one cell: configuration, provenance, results, and the outcomes of single test samples."""

import importlib.metadata
import json
import logging
import platform
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from math import inf, nan, sqrt
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from scipy.stats import norm, t
from torch import Tensor
from torch.utils._pytree import tree_map_only

from facts.result import Summary
from facts.utils.distributed import processor
from facts.utils.files import replacing
from facts.utils.options import first_line
from facts.utils.version import __version__

log = logging.getLogger(__name__)

ERRORS_APART = 2.0  # standard errors between methods
ROOT = Path(__file__).parents[1]
# Stages that make the network.
WORK = ("reading", "calibration", "decomposition", "search", "pruning", "finetuning")
MINUTES = ("search_minutes", "total_minutes")  # among `values`
Status = Literal["done", "failed", "missing", "n.a."]  # in tables
PACKAGES = ("torch", "torchvision", "timm", "numpy", "scipy", "scikit-learn", "hydra-core", "pydantic", "safetensors")


@cache
def versions() -> dict[str, str]:
    packages = {package: importlib.metadata.version(package) for package in PACKAGES}
    return {"facts": __version__, "python": platform.python_version(), **packages}


@cache
def machine(num_threads: int) -> dict[str, str]:
    """Describe the machine; `num_threads` of its processors are in use."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"platform": platform.platform(), "processor": processor(), "gpu": gpu, "threads": str(num_threads)}


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
    """The record of one cell. If `status` is `failed`, `error` holds the reason, and `metrics` and `plan` are empty.

    The fingerprint is a hash of `identity`, `model_hash` (of the weights) and `data_hash`. `outcomes` holds, packed,
    which test samples count in a metric. `summary` is the compression's, None without one; `seconds` covers all stages.
    `analysis` holds the values of an analysis besides its metrics. `weights` holds the file of the network's weights,
    with its SHA-256.
    """

    fingerprint: str
    status: Literal["done", "failed"]
    config: dict[str, Any]
    identity: dict[str, Any]
    model_hash: str
    data_hash: str
    metrics: dict[str, float] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    plan: dict[str, int | None] = field(default_factory=dict)
    summary: Summary | None = None
    analysis: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    attempt: int = 1
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    versions: dict[str, str] = field(default_factory=lambda: versions())
    git: dict[str, Any] = field(default_factory=lambda: git_state())
    machine: dict[str, str] = field(default_factory=lambda: machine(torch.get_num_threads()))

    @property
    def values(self) -> dict[str, float]:
        """Values for tables: metrics, what follows from them, and minutes of the search and the whole compression."""
        work = [self.seconds[stage] / 60 for stage in WORK if stage in self.seconds]
        values = {**self.metrics, **({"total_minutes": sum(work)} if work else {})}
        if "residual_throughput" in values:
            values["residual_speedup"] = values["residual_throughput"] / values["dense_throughput"]
        return values | ({"search_minutes": self.seconds["search"] / 60} if "search" in self.seconds else {})


RECORD = TypeAdapter(Record)


def write_record(record: Record, folder: Path) -> None:
    with replacing(folder / f"{record.fingerprint}.json") as path:
        path.write_text(json.dumps(asdict(record), indent=1))


def write_records(records: Iterable[Record], path: Path) -> None:
    """Write each record once, for use elsewhere: without megabytes of analyses or the path of the results folder."""
    by_fingerprint = {record.fingerprint: record for record in records}
    with replacing(path) as temporary, temporary.open("w") as file:
        for record in by_fingerprint.values():
            portable = replace(record, analysis={}, config=without_place(record.config))
            file.write(f"{json.dumps(asdict(portable))}\n")


def without_place(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a configuration as if its results were in the folder `results`."""
    if "results" not in config:
        return config
    start = f"{config['results']}/"
    moved = tree_map_only(str, lambda text: re.sub(f"^{re.escape(start)}", "results/", text), config)
    return {**moved, "results": "results"}


def published_records(experiment: str, folder: Path) -> Iterator[Record]:
    """Yield the records that `write_records` wrote with an experiment's table, possibly elsewhere."""
    path = folder / "tables" / f"{experiment}.jsonl"
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            yield RECORD.validate_json(line)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            log.warning("a line of %s is damaged or of another version, and left out: %s", path, reason)


def read_record(fingerprint: str, folder: Path) -> Record | None:
    """Read a cell's record; None if there is none. A damaged one is set aside, and its cell runs again."""
    path = folder / f"{fingerprint}.json"
    try:
        record = RECORD.validate_json(path.read_bytes())
        if record.fingerprint != fingerprint or (record.status == "done" and not record.metrics):
            raise ValueError(f"it belongs to the cell {record.fingerprint}, with {len(record.metrics)} metrics")
        if "profile" not in record.config:
            raise ValueError("it has no configuration")
        return record
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason, other = first_line(error), path.with_suffix(f".damaged-{time.time_ns()}")
    log.warning("the record %s is damaged (%s): it is set aside as %s, and its cell runs again", path, reason, other)
    with suppress(OSError):  # the folder may be read-only
        path.replace(other)
    return None


def read_records(folder: Path) -> Iterator[Record]:
    """Read all intact records of a folder."""
    for path in sorted(folder.glob("*.json")):
        if record := read_record(path.stem, folder):
            yield record


def latest_records(folder: Path) -> dict[str, Record]:
    """Find the latest record of each cell in a folder, by `key_of`."""
    found = {}
    for record in sorted(read_records(folder), key=lambda record: record.time):
        model, task = (record.config[group][record.config["profile"]["name"]] for group in ("model", "task"))
        found[key_of(record.identity, record.weights, model, task.get("num_calibration"))] = record
    return found


def key_of(identity: Mapping[str, Any], weights: Mapping[str, str], model: Any, num_calibration: int | None) -> str:
    """Tell cells apart without network and data. Texts of the `model` do not count, as files may have moved."""
    arguments = tree_map_only(str, lambda _: "", model)
    return json.dumps([identity, weights, arguments, num_calibration], sort_keys=True)


def packed(outcomes: Tensor) -> str:
    """Pack whether each sample counts `[N]` into hexadecimal digits; the first bit only marks the start."""
    return f"{int('1' + ''.join('01'[outcome] for outcome in outcomes.tolist()), 2):x}"


def unpacked(text: str) -> np.ndarray:
    """Restore the outcomes `[N]`."""
    return np.array([bit == "1" for bit in f"{int(text, 16):b}"[1:]])


def standard_error(outcomes: np.ndarray) -> float:
    """Compute the standard error of the percentage of outcomes `[N]` or `[draws, N]` that count, over the samples.

    This is the bootstrap's standard error in closed form.
    """
    means = np.atleast_2d(outcomes).mean(axis=0)
    return 100 * means.std(ddof=1) / sqrt(len(means))


def errors_apart(better: np.ndarray, worse: np.ndarray) -> float:
    """Compute how far apart two methods are on the same samples, `[N]` or `[draws, N]`, in standard errors."""
    mean, error = mean_difference(better, worse)
    if not error:
        return mean * inf if mean else 0.0
    return mean / error


def mean_difference(better: np.ndarray, worse: np.ndarray) -> tuple[float, float]:
    """Average the difference of two methods on the same samples, `[N]` or `[draws, N]`; also its standard error.

    The error is over the samples (paired bootstrap) or, for several draws, over the draws if that is larger. Draws are
    few, so theirs is widened: two of them are as sure as two of a normal distribution's.
    """
    difference = np.atleast_2d(better.astype(float) - worse)
    errors = [_error_of_mean(difference.mean(axis=0))]
    if (num_draws := len(difference)) > 1:
        widened = t.ppf(norm.cdf(ERRORS_APART), num_draws - 1) / ERRORS_APART
        errors.append(widened * _error_of_mean(difference.mean(axis=1)))
    return float(difference.mean()), float(max(errors))


def _error_of_mean(values: np.ndarray) -> float:
    return values.std(ddof=1) / sqrt(len(values))


def paired_difference(record: Record, reference: Record, metric: str) -> tuple[float, float]:
    """Compute how many points a record is ahead of another, and the standard error over the same samples if known."""
    ours, theirs = (each.outcomes.get(metric) for each in (record, reference))
    if ours is None or theirs is None:
        return record.values.get(metric, nan) - reference.values.get(metric, nan), nan
    share, error = mean_difference(unpacked(ours), unpacked(theirs))
    return 100 * share, 100 * error
