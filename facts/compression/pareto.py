"""Comparison of several methods at several budgets on the same data: quality against cost."""

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from facts.calibration.data import Batch, as_batches
from facts.calibration.prepare import DEFAULT_EXECUTION, Execution, default_form, prepare
from facts.compression.comparison import with_distance
from facts.compression.compress import compress_prepared, default_search
from facts.cost.count import Cost, CostName
from facts.estimators import ESTIMATORS, Estimator
from facts.modules.forms import FORMS, FormName, refuse_unknown_form
from facts.moments.losses import Loss, OutputError
from facts.search import SEARCHES, Search
from facts.search.budget import Budget
from facts.utils.cache import calibration_key, content_key, name_of
from facts.utils.extras import needing
from facts.utils.files import ScratchFolder, replacing
from facts.utils.registry import by_name

with needing("experiments", "a comparison"):
    import pandas as pd

log = logging.getLogger(__name__)

ORIGINAL = "original"
FINGERPRINT = "fingerprint"


def pareto(
    model: nn.Module,
    calibration: Iterable[Any],
    evaluate: Callable[[nn.Module], dict[str, float]],
    *,
    estimators: Sequence[str | Estimator] = ("facts",),
    searches: Sequence[str | Search] | None = None,
    parts: str = "layers",
    forms: Sequence[FormName] | None = None,
    ratios: Sequence[float] = (0.3, 0.5, 0.7),
    cost: CostName = "flops",
    execution: Execution = DEFAULT_EXECUTION,
    loss: Loss | None = None,
    output_error: OutputError | None = None,
    sensitivity: Iterable[Any] | None = None,
    file: Path | str | None = None,
    evaluation_key: str = "",
) -> pd.DataFrame:
    """Compress with every combination of estimator, search, form and ratio, and evaluate; all share a pass for moments.

    | argument | meaning |
    |---|---|
    | `evaluate` | a function from a network to its metrics by name |
    | `estimators`, `searches`, `forms`, `ratios` | the choices to combine; defaults as in `facts.compress` |
    | `parts` | what is truncated: `layers`, or `units` |
    | `cost`, `execution`, `sensitivity` | as in `facts.compress`; without a cache, moments last until this returns |
    | `loss`, `output_error` | as in `facts.compress`, but defined at the top of a module: keys contain their names |
    | `file` | a CSV that gets each row as soon as it is computed; rows already there are not computed again |
    | `evaluation_key` | identifies the data that `evaluate` measures on |

    The table has a row for the `original`, and one for each combination that does not fail: `estimator`, `search`,
    `form`, `ratio`, `flops` and `params` of the whole network, `latency_ms` of a batch if `cost` is latency, `seconds`
    of the compression, the `distance` of the outputs from the original's on held-out samples with its standard error
    (`distance_error`), the metrics, and a `fingerprint`. Data without a `content_key` are read once into memory. Raises
    `ValueError` for arguments out of range, for a `loss` without a name, and for a file with other content.
    """
    # The `str` of an instance is its `repr`.
    methods = {str(estimator): by_name(estimator, ESTIMATORS, "estimator") for estimator in estimators}
    allocations = {str(search): by_name(search, SEARCHES, "search") for search in searches or ()}
    budgets = {ratio: Budget.of(ratio, cost) for ratio in ratios}
    forms = forms or [default_form(model, execution.precision)]
    for form in forms:
        refuse_unknown_form(form)
    for function, argument in ((loss, "loss"), (output_error, "output_error")):
        if function:
            name_of(function, argument)
    file = Path(file) if file else None
    rows = _read(file)
    data = _read_once(calibration, model)
    if next(iter(data), None) is None:
        raise ValueError("the calibration data is empty: it must yield at least one batch")
    compared = None if sensitivity is None else _read_once(sensitivity, model)
    scratch = ScratchFolder()
    prepared = prepare(model, data, parts=parts, loss=loss, output_error=output_error, execution=execution)
    prepared = prepared if prepared.cache else prepared.cached_in(scratch.path)
    assert prepared.cache
    allocations = allocations or {"cors_fisher": default_search(prepared)}

    def add(key: str, point: tuple[str, str, str, float], network: nn.Module, cost: Cost, **more: float | None) -> None:
        metrics = evaluate(network)
        log.info("%s, %s, %s, %g: %s", *point, ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
        names = "estimator", "search", "form", "ratio"
        rows[key] = dict(zip(names, point, strict=True), flops=cost.flops, params=cost.params, **more, **metrics)
        if file:
            with replacing(file) as path:
                _table(rows, rows).to_csv(path, index=False)

    compared_by = output_error and name_of(output_error, "output_error")
    setting = (prepared.cache.folder.name, compared and calibration_key(compared), compared_by, cost, evaluation_key)
    original = content_key(*setting)
    points = {
        content_key(*setting, methods[estimator], allocations[search], form, ratio): (estimator, search, form, ratio)
        for estimator, search, form, ratio in itertools.product(methods, allocations, forms, ratios)
    }
    missing = {key: point for key, point in points.items() if key not in rows}
    prepared.collect(methods[name] for name in dict.fromkeys(estimator for estimator, *_ in missing.values()))
    for key, point in missing.items():
        estimator, search, form, ratio = point
        method = methods[estimator], allocations[search], budgets[ratio]
        try:
            formed = prepared.in_form(FORMS[form](execution.precision))
            result = with_distance(compress_prepared(formed, *method, compared), prepared)
        except ValueError as error:
            log.error("%s, %s, %s, %g: %s", *point, error)
            continue
        summary = result.summary
        times = {name: 1000 * seconds for name, seconds in summary.latency.items()}
        if original not in rows:
            whole = ORIGINAL, ORIGINAL, ORIGINAL, 1.0
            own = {"latency_ms": times.get("dense"), "seconds": 0.0, "distance": 0.0, "distance_error": 0.0}
            add(original, whole, model, summary.before, **own)
        more = {"latency_ms": times.get("measured"), "seconds": sum(summary.seconds.values())}
        if found := summary.distance:
            more |= {"distance": found.mean, "distance_error": found.standard_error}
        add(key, point, result.model, summary.after, **more)
    return _table(rows, [original, *points])


def efficient(cost: pd.Series, quality: pd.Series) -> pd.Series:
    """Mark the points that no other beats: none at least as good costs less, and none that costs no more is better."""
    return pd.Series(
        [
            not (((cost <= own) & (quality > value)) | ((cost < own) & (quality >= value))).any()
            for own, value in zip(cost, quality, strict=True)
        ],
        index=cost.index,
    )


class ReadBatches(list[Batch]):
    """Batches in memory, hashed only once."""

    @cached_property
    def content_key(self) -> str:
        return content_key(*self)


def _read_once(data: Iterable[Any], model: nn.Module) -> Iterable[Batch]:
    """Return the data as batches, read once into memory unless they have a `content_key`."""
    batches = as_batches(data, model) or ()
    return batches if getattr(batches, "content_key", None) is not None else ReadBatches(batches)


def _read(file: Path | None) -> dict[str, dict[str, Any]]:
    """Read the rows of a table by fingerprint. Raises `ValueError` for a file with other content."""
    if file is None or not file.exists():
        return {}
    try:
        return pd.read_csv(file, dtype={FINGERPRINT: str}).set_index(FINGERPRINT).to_dict("index")
    except (KeyError, ValueError) as error:
        raise ValueError(f"{file} is not a table of this kind ({error}): move it, or name another file") from error


def _table(rows: dict[str, dict[str, Any]], keys: Iterable[str]) -> pd.DataFrame:
    """Make a table of the rows with these fingerprints, in this order, without missing ones."""
    return pd.DataFrame([rows[key] | {FINGERPRINT: key} for key in keys if key in rows])
