"""Several methods at several budgets, from the same data: what each keeps for what it costs."""

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from facts.budget import all_bounds
from facts.cache import calibration_key, content_key, name_of
from facts.calibration import Batch, as_batches
from facts.compression import compress, moment_cache
from facts.cost import Cost, CostName
from facts.estimators import ESTIMATORS, Estimator
from facts.files import ScratchFolder, replacing
from facts.hardware import DEFAULT_TIMING, TimingPolicy
from facts.losses import Loss, SampledLabels, summed_cross_entropy
from facts.memory import DEFAULT_POLICY, MemoryPolicy
from facts.moments.collect import collect_moments, in_groups
from facts.names import by_name
from facts.search import SEARCHES, Search
from facts.selection import choose_layers
from facts.version import __version__

log = logging.getLogger(__name__)

ORIGINAL = "original"
FINGERPRINT = "fingerprint"


def pareto(
    model: nn.Module,
    calibration: Iterable[Any],
    evaluate: Callable[[nn.Module], dict[str, float]],
    *,
    estimators: Sequence[str | Estimator] = ("facts",),
    searches: Sequence[str | Search] = ("uniform",),
    ratios: Sequence[float] = (0.3, 0.5, 0.7),
    cost: CostName = "flops",
    sensitivity: Iterable[Any] | None = None,
    loss: Loss | None = None,
    precision: torch.dtype = torch.float32,
    memory: MemoryPolicy = DEFAULT_POLICY,
    timing: TimingPolicy = DEFAULT_TIMING,
    cache: Path | str | None = None,
    file: Path | str | None = None,
    evaluation_key: str = "",
) -> pd.DataFrame:
    """Compress by every estimator with every search to every ratio, and evaluate; all share one pass for moments.

    The table has a row for the `original`, and one for each combination: `estimator`, `search`, `ratio`, `flops` and
    `params` of the whole network, `latency_ms` of a batch where `cost` is latency, `seconds` that the compression took,
    the metrics of `evaluate(model)`, and a `fingerprint`. A combination that fails is logged and has no row. The other
    arguments are those of `facts.compress`; without `cache`, moments are kept for as long as this runs. `loss` must be
    a function at the top of a module, by whose name they are kept. Data without a `content_key` of their own are read
    once and stay in memory, so that all methods see the same, of a loader that shuffles too.

    `file` is a CSV that gets each row when it is there; those it has already are not computed again. Rows of other
    networks, data or settings stay in it. `evaluation_key` says on what data `evaluate` measures. Raises `ValueError`
    for arguments out of range, for a `loss` without a name, and for a file that holds something else.
    """
    methods = {_label(estimator): by_name(estimator, ESTIMATORS, "estimator") for estimator in estimators}
    allocations = {_label(search): by_name(search, SEARCHES, "search") for search in searches}
    for ratio in ratios:
        all_bounds(ratio, cost, {})
    if loss:
        _refuse_nameless(loss)
    table = Table.read(Path(file) if file else None)

    data = _read_once(calibration, model)
    compared = None if sensitivity is None else _read_once(sensitivity, model)
    inputs, targets = next(iter(data), (None, None))
    if inputs is None:
        raise ValueError("the calibration data is empty: it must yield at least one batch")
    loss = loss or (SampledLabels(summed_cross_entropy) if targets is None else summed_cross_entropy)
    chosen = choose_layers(model, None, None, None, inputs)
    scratch = ScratchFolder()
    cache = Path(cache) if cache else scratch.path
    kept = moment_cache(cache, chosen.model, chosen.layers, data, loss, precision)

    setting = (kept.folder.name, compared and calibration_key(compared), cost, evaluation_key, __version__)
    original = content_key(*setting)
    points = {
        content_key(*setting, methods[estimator], allocations[search], ratio): (estimator, search, ratio)
        for estimator, search, ratio in itertools.product(methods, allocations, ratios)
    }
    missing = {key: point for key, point in points.items() if key not in table.rows}
    settings: dict[str, Any] = {"loss": loss, "precision": precision, "memory": memory}
    moments = {moment for estimator, _, _ in missing.values() for moment in methods[estimator].moments}
    for names, group in in_groups(chosen.layers, memory, kept) if moments else ():
        collect_moments(chosen.model, chosen.layers, data, moments, **settings, cache=group, only=names)

    for key, (estimator, search, ratio) in missing.items():
        method: dict[str, Any] = {
            "estimator": methods[estimator],
            "search": allocations[search],
            "ratio": ratio,
            "cost": cost,
        }
        try:
            result = compress(model, data, **method, sensitivity=compared, **settings, timing=timing, cache=cache)
        except ValueError as error:
            log.error("%s, %s, %g: %s", estimator, search, ratio, error)
            continue
        summary = result.summary
        if original not in table.rows:
            row = _row(ORIGINAL, ORIGINAL, 1.0, summary.before, summary.latency.get("dense"), 0.0)
            table.add(original, row, evaluate(model))
        seconds = sum(summary.seconds.values())
        row = _row(estimator, search, ratio, summary.after, summary.latency.get("measured"), seconds)
        table.add(key, row, evaluate(result.model))
    return table.of([original, *points])


class ReadBatches(list[Batch]):
    """Batches in memory, which are hashed once."""

    @cached_property
    def content_key(self) -> str:
        return content_key(*self)


def _read_once(data: Iterable[Any], model: nn.Module) -> Iterable[Batch]:
    """The batches of data that know their own key; of others, those that one reading gave."""
    batches = as_batches(data, model) or ()
    return batches if getattr(batches, "content_key", None) is not None else ReadBatches(batches)


def _refuse_nameless(loss: Loss) -> None:
    """Raises `ValueError` for a loss whose moments could not be told from another's."""
    try:
        name_of(loss, "loss")
    except ValueError as error:
        raise ValueError(
            "pareto keeps moments between methods: give loss= as a function at the top of a module"
        ) from error


def efficient(cost: pd.Series, quality: pd.Series) -> pd.Series:
    """Which points no other beats: none costs less for the same quality, or has more of it for the same cost."""
    return pd.Series(
        [
            not (((cost <= own) & (quality > value)) | ((cost < own) & (quality >= value))).any()
            for own, value in zip(cost, quality, strict=True)
        ],
        index=cost.index,
    )


@dataclass
class Table:
    """Rows by fingerprint; in a CSV too, if there is a file for them."""

    rows: dict[str, dict[str, Any]]
    file: Path | None

    @classmethod
    def read(cls, file: Path | None) -> "Table":
        """Raises `ValueError` for a file that holds something else."""
        if file is None or not file.exists():
            return cls({}, file)
        try:
            rows = pd.read_csv(file, dtype={FINGERPRINT: str}).set_index(FINGERPRINT).to_dict("index")
        except (KeyError, ValueError) as error:
            raise ValueError(f"{file} is no table of this kind ({error}): move it, or name another file") from error
        return cls(rows, file)

    def add(self, key: str, row: dict[str, Any], metrics: dict[str, float]) -> None:
        self.rows[key] = row | metrics
        figures = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        log.info("%s, %s, %g: %s", row["estimator"], row["search"], row["ratio"], figures)
        if self.file:
            with replacing(self.file) as path:
                self.of(self.rows).to_csv(path, index=False)

    def of(self, keys: Iterable[str]) -> pd.DataFrame:
        """The rows of these fingerprints, as far as they are there, in this order."""
        found = [self.rows[key] | {FINGERPRINT: key} for key in keys if key in self.rows]
        return pd.DataFrame(found)


def _row(
    estimator: str, search: str, ratio: float, cost: Cost, latency: float | None, seconds: float
) -> dict[str, Any]:
    return {
        "estimator": estimator,
        "search": search,
        "ratio": ratio,
        "flops": cost.flops,
        "params": cost.params,
        "latency_ms": latency and 1000 * latency,
        "seconds": seconds,
    }


def _label(choice: Any) -> str:
    """A method's name, or how it was made."""
    return choice if isinstance(choice, str) else repr(choice)
