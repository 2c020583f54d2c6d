"""`facts.compress`: prepare a network, compress it to a budget, and compare the result with the original."""

import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

from facts.calibration.prepare import prepare
from facts.calibration.prepared_model import DEFAULT_EXECUTION, Execution, PreparedModel
from facts.compression.comparison import with_distance, with_latency
from facts.compression.plan import compress_prepared
from facts.cost.count import CostName
from facts.estimators import ESTIMATORS, Estimator
from facts.modules.forms import FormName, form_named
from facts.moments.losses import Loss
from facts.parts.layers import LayerNames, is_pattern
from facts.result import CompressionResult
from facts.search import SEARCHES, Search
from facts.search.budget import Budget
from facts.search.methods.cors_fisher import CoRSFisher
from facts.search.methods.uniform import Uniform
from facts.utils.files import ScratchFolder
from facts.utils.options import by_name
from facts.utils.progress import stopwatch

log = logging.getLogger(__name__)

HUNDREDTHS = range(10, 100)  # most searches leave every layer at least a tenth


def compress(
    model: nn.Module | PreparedModel,
    calibration: Iterable[Any] | None = None,
    *,
    estimator: str | Estimator | None = None,
    search: str | Search | None = None,
    parts: str | Collection[str] | None = None,
    form: FormName | None = None,
    ratio: float | None = None,
    cost: CostName = "flops",
    bounds: Mapping[CostName, float] | None = None,
    budget: Budget | None = None,
    execution: Execution | None = None,
    loss: Loss | None = None,
    sensitivity: Iterable[Any] | None = None,
    layers: LayerNames = None,
) -> CompressionResult:
    """Compress a copy of `model` so that a fraction `ratio` of the cost of its linear layers remains.

    | argument | meaning |
    |---|---|
    | `model` | a network, or the `PreparedModel` that `facts.prepare` made of one (`output_error`, `outputs`, ...) |
    | `calibration` | loader or dataset of `(inputs, targets)`, mappings with `labels`, inputs, or tokens `[N, T]` |
    | `estimator` | what weighs the directions of each part: a name or an instance (default: `facts`) |
    | `search` | what chooses the ranks (default: `cors_fisher`; without data `uniform`) |
    | `parts` | `units`, which are attention's products and hidden units, `tokens`, `layers`, or several (see below) |
    | `form` | how a layer of rank k is stored: `plain` or `pivoted` (default; in half precision `plain`) |
    | `ratio` | the fraction of the cost that remains (default: one half, if nothing else is bounded) |
    | `cost` | what `ratio` bounds: `flops`, `params`, or `latency` of the whole network on one calibration batch |
    | `bounds` | further ratios, `{"params": 0.6}` |
    | `budget` | limits on the whole network, or on its outputs' error: `facts.Budget` |
    | `execution` | precision, memory, timing and cache of all passes: `facts.Execution` |
    | `loss` | sum of the samples' losses (default: cross-entropy, drawing missing labels; features: `facts.prepare`) |
    | `sensitivity` | batches on which a search compares outputs (default: the first calibration batches) |
    | `layers` | names; a pattern, `"tower.*"`; `"all"`, with 1x1 convolutions; `"linear"` ones (default if any) |

    By default, units are truncated and, unless only parameters are bounded, tokens that are alike are merged in blocks
    with global attention. Layers are truncated instead, as in published methods, if an estimator, a search, a form or
    layers (other than by a pattern) are named, and without data. In the plan, a 1x1 convolution is called
    `<name>.linear`. The result's `skipped` gives the reason for each layer that was not compressed.
    `facts.SampledLabels(loss)` draws labels from the network: the true Fisher. Processes that have joined a group share
    the data and get the same plan. Data are read about once; searches and comparisons read some hundred samples again.
    Raises `ValueError` for arguments out of range, for data that do not suit the loss, and for a budget that no plan of
    the search meets.
    """
    if isinstance(model, PreparedModel) and any(
        each is not None for each in (calibration, execution, loss, layers, parts)
    ):
        raise ValueError("data, execution, loss, layers and parts of a prepared network go to facts.prepare")
    if not isinstance(budget, Budget | None):
        raise ValueError(f"budget= takes facts.Budget(flops=..., params=...), and ratio= a fraction; got {budget!r}")
    named = estimator, search, form, None if is_pattern(layers) else layers
    estimator = by_name(estimator or "facts", ESTIMATORS, "estimator")
    search = by_name(search, SEARCHES, "search") if search else None
    budget = (budget or Budget()).with_ratios(ratio, cost, bounds)
    if budget.error is not None and cost == "latency":
        raise ValueError('error asks for the smallest network: choose cost="flops" or "params", not latency')
    with stopwatch() as seconds:
        if isinstance(model, PreparedModel):
            prepared = model.in_form(form_named(form, model.execution.precision)) if form else model
        else:
            prepared = prepare(
                model,
                calibration,
                layers=layers,
                parts=default_parts(calibration, budget, cost, *named) if parts is None else parts,
                form=form,
                loss=loss,
                execution=execution or DEFAULT_EXECUTION,
            )
        search = search or default_search(prepared)
        others = None if sensitivity is None else prepared.data_of(sensitivity, "sensitivity")
        compress_to = partial(compress_prepared, estimator=estimator, search=search, sensitivity=others)
        if budget.error is None:
            result = compress_to(prepared, budget=budget)
        else:
            result = smallest_within(budget.error, prepared, cost, compress_to)
        if prepared.data is not None:
            result = with_latency(result, prepared)
            if budget.error is None:
                result = with_distance(result, prepared)
            if (predicted := result.summary.predicted) is not None:
                log.debug("the search predicted a distance of %.4g, the sum of all parts' errors", predicted)
            if result.summary.is_far:
                log.warning("%s; %s", result.summary.distance, result.summary.advice)
    return result.with_summary(seconds=dict(seconds))


def default_parts(calibration: Iterable[Any] | None, budget: Budget, cost: CostName = "flops", *named: object) -> str:
    """Units and tokens, which keep most accuracy (results/photos); layers if `named`, or where units cannot work.

    Units alone, if only parameters are bounded, of which tokens save none.
    """
    if calibration is None or any(each is not None for each in named):
        return "layers"
    return "units" if (budget.costs or {cost}) == {"params"} else "units,tokens"


def default_search(prepared: PreparedModel) -> Search:
    """Choose the best search that needs at most one more data pass; without data, one that needs none."""
    if prepared.data is None:
        return Uniform()
    return CoRSFisher(labels="sampled" if prepared.draws_labels else "given")


def smallest_within(
    error: float, prepared: PreparedModel, cost: CostName, compress_to: Callable[..., CompressionResult]
) -> CompressionResult:
    """Find the smallest ratio, in hundredths, at which outputs are within `error` of the original's, by bisection.

    Raises `ValueError` without data, and if even the largest ratio exceeds the error.
    """
    if prepared.data is None:
        raise ValueError("error compares outputs on calibration data: give some, or a ratio")
    if prepared.held_out.first is None:
        raise ValueError("error is measured on held-out samples, but there are too few: give at least 4 samples")
    scratch = ScratchFolder()  # one decomposition serves all ratios
    cached = prepared if prepared.cache else prepared.cached_in(scratch.path)
    *smaller, largest = HUNDREDTHS
    results: dict[int, CompressionResult] = {}

    def suffices(hundredths: int) -> bool:
        budget = Budget.of(hundredths / 100, cost)
        try:
            results[hundredths] = with_distance(compress_to(cached, budget=budget), cached, error)
        except ValueError as reason:
            if hundredths == largest:
                raise
            log.info("%d%% of the %s: %s", hundredths, cost, reason)
            return False
        distance = results[hundredths].summary.distance
        assert distance is not None  # as there are held-out samples
        log.info("%d%% of the %s: %s", hundredths, cost, distance)
        return distance.mean <= error

    if not suffices(largest):
        found = results[largest].summary.distance
        raise ValueError(f"even with {largest}% of the {cost}, {found}: allow an error of more than {error:g}")
    return results[HUNDREDTHS[bisect_left(smaller, True, key=suffices)]]
