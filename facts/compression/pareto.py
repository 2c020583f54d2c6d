"""Quality against cost: several methods at several budgets, from one pass over the calibration data."""

import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from facts.calibration.prepared_model import PreparedModel
from facts.compression.compress import compress, default_search
from facts.compression.plan import checked_problem
from facts.estimators import ESTIMATORS, Estimator
from facts.result import STANDARD_ERROR
from facts.search import SEARCHES, Search
from facts.search.budget import Budget
from facts.utils.files import ScratchFolder, replacing
from facts.utils.options import by_name, needing

with needing("experiments", "a comparison"):
    import pandas as pd

BESIDE = (STANDARD_ERROR, "num_samples")  # columns that no line of progress needs
log = logging.getLogger(__name__)


def pareto(
    prepared: PreparedModel,
    evaluate: Callable[[nn.Module], dict[str, float]],
    *,
    estimators: Sequence[str | Estimator] = ("facts",),
    searches: Sequence[str | Search] = (),
    ratios: Sequence[float] = (0.3, 0.5, 0.7),
    file: Path | str | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Compress a prepared network by each method to each ratio; `options` are further ones of `facts.compress`.

    Without `searches`, it is the default one of `facts.compress`, called `default`.

    `evaluate` gives a network's metrics by name; `file` is a CSV, written after each row. The first row is of the
    `original`. Combinations that fail are left out; raises `ValueError` if all do. Costs are those of whole networks.
    """
    if not isinstance(prepared, PreparedModel):
        raise ValueError(f"pareto needs what facts.prepare returns, got {type(prepared).__name__}")
    if not all(isinstance(each, Collection) and not isinstance(each, str) for each in (estimators, searches, ratios)):
        raise ValueError("estimators, searches and ratios are lists, as in ratios=[0.5]")
    if not (estimators and ratios):
        raise ValueError("there is nothing to compare: name an estimator and a ratio")
    for ratio in ratios:
        Budget.of(ratio)  # refuses those out of range
    scratch, rows = ScratchFolder(), list[dict[str, Any]]()
    cached = prepared if prepared.cache else prepared.cached_in(scratch.path)
    chosen = {str(each): by_name(each, ESTIMATORS, "estimator") for each in estimators}
    named = {str(each): by_name(each, SEARCHES, "search") for each in searches} or {"default": default_search(cached)}
    given, cost, bounds = options.get("budget") or Budget(), options.get("cost", "flops"), options.get("bounds")
    possible: list[tuple[str, str, float]] = []
    for estimator, search, ratio in itertools.product(chosen, named, ratios):
        with left_out(estimator, search, ratio):
            budget = given.with_ratios(ratio, cost, bounds)
            checked_problem(cached, chosen[estimator], named[search], budget)
            possible.append((estimator, search, ratio))
    cached.collect(chosen[name] for name in dict.fromkeys(estimator for estimator, _, _ in possible))
    for estimator, search, ratio in possible:
        result = None
        with left_out(estimator, search, ratio):
            result = compress(cached, estimator=chosen[estimator], search=named[search], ratio=ratio, **options)
        if result is None:
            continue
        summary, form = result.summary, result.summary.form
        original = ("original", "original", "original", 1.0, summary.before, "dense", 0.0, cached.model)
        distance = summary.distance and summary.distance.mean
        point = (estimator, search, form, ratio, summary.after, "measured", distance, result.model)
        for *method, cost, which, far, network in [point] if rows else [original, point]:
            row = dict(zip(("estimator", "search", "form", "ratio"), method, strict=True))
            row |= {"flops": cost.flops, "params": cost.params, "latency_ms": 1000 * summary.latency[which]}
            metrics = evaluate(network)
            rows.append(row | {"distance": far, **metrics})
            found = [
                f"{name} {round(value, 4) if isinstance(value, float) else value}"
                for name, value in metrics.items()
                if not name.endswith(BESIDE)
            ]
            dense = {"FLOPs": (cost.flops, summary.before.flops), "parameters": (cost.params, summary.before.params)}
            left = [f"{own / whole:.1%} of the {name}" for name, (own, whole) in dense.items() if own and whole]
            log.info("%s, %s, ratio %g: %s", *method[:2], method[3], ", ".join([*found, *left]))
        if file:
            with replacing(Path(file)) as path:
                pd.DataFrame(rows).to_csv(path, index=False)
    if not rows:
        raise ValueError("no method produced a compressed network: the errors above say why")
    return pd.DataFrame(rows)


@contextmanager
def left_out(estimator: str, search: str, ratio: float) -> Iterator[None]:
    """Log why a combination fails, if the block raises a `ValueError`."""
    try:
        yield
    except ValueError as error:
        log.error("%s, %s, %g: %s", estimator, search, ratio, error)
