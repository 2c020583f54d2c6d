"""Comparison of several methods at several budgets on the same data: quality against cost."""

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from facts.calibration.data import Batch, as_batches
from facts.calibration.prepare import prepare
from facts.compression.budget import Budget
from facts.compression.compress import compress_prepared, default_form, default_search
from facts.compression.pareto_table import ORIGINAL, ParetoTable, table_row
from facts.cost.count import CostName
from facts.cost.timing import DEFAULT_TIMING, TimingPolicy
from facts.estimators import ESTIMATORS, Estimator
from facts.modules.forms import FormName, refuse_unknown_form
from facts.moments.execution import Execution
from facts.moments.losses import Loss
from facts.moments.memory import DEFAULT_POLICY, MemoryPolicy
from facts.search import SEARCHES, Search
from facts.utils.cache import calibration_key, content_key, name_of
from facts.utils.files import ScratchFolder
from facts.utils.registry import by_name

if TYPE_CHECKING:
    from pandas import DataFrame

log = logging.getLogger(__name__)


def pareto(
    model: nn.Module,
    calibration: Iterable[Any],
    evaluate: Callable[[nn.Module], dict[str, float]],
    *,
    estimators: Sequence[str | Estimator] = ("facts",),
    searches: Sequence[str | Search] | None = None,
    forms: Sequence[FormName] | None = None,
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
) -> "DataFrame":
    """Compress with every estimator, search, form and ratio, and evaluate; one data pass for moments serves all.

    The table has a row for the `original`, and one for each combination: `estimator`, `search`, `form`, `ratio`,
    `flops` and `params` of the whole network, `latency_ms` of a batch if `cost` is latency, the `seconds` of the
    compression, the metrics of `evaluate(model)`, and a `fingerprint`. A combination that fails is logged and has no
    row. The other arguments are those of `facts.compress`; without `cache`, moments are kept until this returns. `loss`
    must be a function at the top of a module, since its name is part of their key. Data without a `content_key` of
    their own are read once and stay in memory, so that all methods see the same batches, even from a loader that
    shuffles.

    `file` is a CSV to which each row is written as soon as it is computed; rows that are there already are not computed
    again. Rows of other networks, data or settings stay in it. `evaluation_key` identifies the data that `evaluate`
    measures on. Raises `ValueError` for arguments out of range, for a `loss` without a name, and for a file that holds
    something else.
    """
    methods = {_label(estimator): by_name(estimator, ESTIMATORS, "estimator") for estimator in estimators}
    allocations = {_label(search): by_name(search, SEARCHES, "search") for search in searches or ()}
    allocations = allocations or {"cors_fisher": default_search(calibration, loss)}
    budgets = {ratio: Budget.of(ratio, cost) for ratio in ratios}
    forms = forms or [default_form(model, precision)]
    for form in forms:
        refuse_unknown_form(form)
    if loss:
        _refuse_nameless(loss)
    table = ParetoTable.read(Path(file) if file else None)
    data = _read_once(calibration, model)
    if next(iter(data), None) is None:
        raise ValueError("the calibration data is empty: it must yield at least one batch")
    compared = None if sensitivity is None else _read_once(sensitivity, model)
    scratch = ScratchFolder()
    prepared = prepare(
        model, data, loss=loss, execution=Execution(precision, memory), cache=Path(cache) if cache else scratch.path
    )
    assert prepared.cache is not None  # a cache has a folder

    setting = (prepared.cache.folder.name, compared and calibration_key(compared), cost, evaluation_key)
    original = content_key(*setting)
    points = {
        content_key(*setting, methods[estimator], allocations[search], form, ratio): (estimator, search, form, ratio)
        for estimator, search, form, ratio in itertools.product(methods, allocations, forms, ratios)
    }
    missing = {key: point for key, point in points.items() if key not in table.rows}
    prepared.collect(methods[name] for name in dict.fromkeys(estimator for estimator, *_ in missing.values()))
    for key, (estimator, search, form, ratio) in missing.items():
        try:
            result = compress_prepared(
                prepared, methods[estimator], allocations[search], budgets[ratio], form, compared, timing
            )
        except ValueError as error:
            log.error("%s, %s, %s, %g: %s", estimator, search, form, ratio, error)
            continue
        summary = result.summary
        if original not in table.rows:
            row = table_row(ORIGINAL, ORIGINAL, ORIGINAL, 1.0, summary.before, summary.latency.get("dense"), 0.0)
            table.add(original, row, evaluate(model))
        seconds = sum(summary.seconds.values())
        row = table_row(estimator, search, form, ratio, summary.after, summary.latency.get("measured"), seconds)
        table.add(key, row, evaluate(result.model))
    return table.of([original, *points])


class ReadBatches(list[Batch]):
    """Batches in memory, which are hashed once."""

    @cached_property
    def content_key(self) -> str:
        return content_key(*self)


def _read_once(data: Iterable[Any], model: nn.Module) -> Iterable[Batch]:
    """The data themselves if they have a `content_key`; else their batches, read once into memory."""
    batches = as_batches(data, model) or ()
    return batches if getattr(batches, "content_key", None) is not None else ReadBatches(batches)


def _refuse_nameless(loss: Loss) -> None:
    """Raises `ValueError` for a loss whose moments could not be distinguished from those of another loss."""
    try:
        name_of(loss, "loss")
    except ValueError as error:
        raise ValueError(
            "pareto keeps moments between methods: give loss= as a function at the top of a module"
        ) from error


def _label(choice: Any) -> str:
    """A method's name, or the representation of an instance."""
    return choice if isinstance(choice, str) else repr(choice)
