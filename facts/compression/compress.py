"""From a network and a budget to a smaller network."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from facts.calibration.checks import refuse_unfit_network
from facts.calibration.data import Batch, FirstSamples, as_batches
from facts.calibration.execution import DEFAULT_EXECUTION, Execution
from facts.calibration.prepare import Calibration, prepare
from facts.calibration.selection import LayerNames, is_pattern
from facts.compression.allocation import allocate_ranks, batch_times
from facts.compression.comparison import with_distance
from facts.compression.quality import smallest_within
from facts.compression.rounds import narrow_in_rounds, rounds_to
from facts.compression.summarize import summarize
from facts.cost.count import CostName, count_flops
from facts.cost.trace import has_row_per_sample
from facts.decomposition.parts import PartsName
from facts.estimators import ESTIMATORS, Estimator
from facts.modules.forms import FORMS, FormName, refuse_unknown_form
from facts.modules.modes import without_autocast
from facts.moments.data_pass import within_memory
from facts.moments.losses import Loss
from facts.result import CompressionResult
from facts.search import SEARCHES, AllocationProblem, Search
from facts.search.budget import Budget
from facts.search.methods.cors_fisher import CoRSFisher
from facts.search.methods.uniform import Uniform
from facts.utils.batches import batch_size, first_of, in_parts, to_device
from facts.utils.registry import by_name
from facts.utils.stopwatch import stage, stopwatch

log = logging.getLogger(__name__)

NUM_TIMED = 16  # samples in the batch on which both networks are timed


def compress(
    model: nn.Module | Calibration,
    calibration: Iterable[Any] | None = None,
    *,
    estimator: str | Estimator | None = None,
    search: str | Search | None = None,
    parts: PartsName | None = None,
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
    | `model` | a network, or the `Calibration` that `facts.prepare` made of one (`output_error`, `fit_bias`, ...) |
    | `calibration` | loader or dataset of `(inputs, targets)`, mappings with `labels`, inputs, or tokens `[N, T]` |
    | `estimator` | what weighs the directions of each part: a name or an instance (default: `facts`) |
    | `search` | what chooses the ranks (default: `cors_fisher`; without data `uniform`) |
    | `parts` | what is truncated: `units`, which are attention's products and hidden units, or `layers` (see below) |
    | `form` | how a layer of rank k is stored: `plain` or `pivoted` (default; in half precision `plain`) |
    | `ratio` | the fraction of the cost that remains (default: one half, if nothing else is bounded) |
    | `cost` | what `ratio` bounds: `flops`, `params`, or `latency` of the whole network on one calibration batch |
    | `bounds` | further ratios, `{"params": 0.6}` |
    | `budget` | limits on the whole network, or on its outputs' error: `facts.Budget` |
    | `execution` | precision, memory, timing and cache of all passes: `facts.Execution` |
    | `loss` | sum of the samples' losses (default: cross-entropy, drawing missing labels; features: `facts.prepare`) |
    | `sensitivity` | batches on which a search compares outputs (default: the first calibration batches) |
    | `layers` | names; a pattern, `"tower.*"`; `"all"`, with 1x1 convolutions; `"linear"` ones (default if any) |

    By default, units are truncated. Layers are truncated instead, as in published methods, if an estimator, a search, a
    form or layers (other than by a pattern) are named, and without data. In the plan, a 1x1 convolution is called
    `<name>.linear`. The result's `skipped` gives the reason for each layer that was not compressed.
    `facts.SampledLabels(loss)` draws labels from the network: the true Fisher. Processes that have joined a group share
    the data and get the same plan. Raises `ValueError` for arguments out of range, for data that do not suit the loss,
    and for a budget that no plan of the search meets.
    """
    named = estimator, search, form, None if is_pattern(layers) else layers
    given = model.model if isinstance(model, Calibration) else model
    refuse_unfit_network(given)
    if isinstance(model, Calibration):
        if any(each is not None for each in (calibration, execution, loss, layers, parts)):
            raise ValueError("data, execution, loss, layers and parts of a prepared network go to facts.prepare")
        execution = model.execution
    execution = execution or DEFAULT_EXECUTION
    form = form or default_form(given, execution.precision)
    refuse_unknown_form(form)
    estimator = by_name(estimator or "facts", ESTIMATORS, "estimator")
    search = by_name(search, SEARCHES, "search") if search else None
    budget = (budget or Budget()).with_ratios(ratio, cost, bounds)
    if budget.error is not None and cost == "latency":
        raise ValueError('error asks for the smallest network: choose cost="flops" or "params", not latency')
    with stopwatch():
        prepared = (
            model
            if isinstance(model, Calibration)
            else prepare(
                model,
                calibration,
                layers=layers,
                parts=parts or default_parts(calibration, *named),
                loss=loss,
                execution=execution,
            )
        )
        search = search or default_search(prepared)
        others = as_batches(sensitivity, given)
        if others is not None and first_of(others) is None:
            raise ValueError("the sensitivity data is empty: it must yield at least one (inputs, targets) batch")
        compress_to = partial(compress_prepared, estimator=estimator, search=search, form=form, sensitivity=others)
        if budget.error is None:
            result = compress_to(prepared, budget=budget)
        else:
            result = smallest_within(budget.error, prepared, budget.rounds, cost, compress_to)
        if prepared.data is not None:
            result = with_latency(result, prepared)
            if budget.error is None:
                result = with_distance(result, prepared)
            if result.summary.is_far:
                log.warning("%s; %s", result.summary.distance, result.summary.advice)
        result = with_full_flops(result, prepared)
    return result


def with_full_flops(result: CompressionResult, calibration: Calibration) -> CompressionResult:
    """Count FLOPs by the full rule, if they are known; linear layers save as many as by the paper's rule."""
    before, after = result.summary.before.flops, result.summary.after.flops
    if calibration.example is None or before is None or after is None:
        return result
    full = count_flops(calibration.model, calibration.example, "full")
    left = count_flops(result.model, calibration.example, "full") if calibration.units else full - before + after
    return replace(result, summary=replace(result.summary, full_flops=(full, left)))


def with_latency(result: CompressionResult, calibration: Calibration) -> CompressionResult:
    """Time both networks in turns on a few samples, unless a bounded latency has been measured already."""
    if result.summary.latency:
        return result
    inputs, execution = calibration.first_inputs, calibration.execution
    if has_row_per_sample(inputs):
        inputs = tree_map_only(Tensor, lambda tensor: tensor[:NUM_TIMED], inputs)
    inputs = to_device(inputs, next(calibration.model.parameters()).device)
    networks = {"dense": calibration.model, "measured": result.model}

    def timed(num_parts: int) -> dict[str, float]:
        part, _ = next(in_parts((inputs, None), num_parts))
        times = batch_times(networks, part, replace(execution.timing, min_seconds=0.0), execution.precision)
        return {name: timing.median for name, timing in times.items()} | {"samples": batch_size(part)}

    with stopwatch() as seconds, stage("latency"):
        latency = within_memory(timed, execution.memory.halve_batches)
    return replace(result, summary=replace(result.summary, latency=latency, seconds=dict(seconds)))


def default_parts(calibration: Iterable[Any] | None, *named: object) -> PartsName:
    """Units, which keep most accuracy (results/photos/units.md); layers if `named`, or where units cannot work."""
    are_layers = calibration is None or any(each is not None for each in named)
    return "layers" if are_layers else "units"


def default_search(calibration: Calibration) -> Search:
    """Choose the best search that needs at most one more data pass; without data, one that needs none."""
    if calibration.data is None:
        return Uniform()
    return CoRSFisher(labels="sampled" if calibration.draws_labels else "given")


def default_form(model: nn.Module, precision: torch.dtype) -> FormName:
    """Choose pivoted layers, but plain ones in half precision, where pivots have to be permuted."""
    types = {precision, *(parameter.dtype for parameter in model.parameters())}
    return "plain" if types & {torch.bfloat16, torch.float16} else "pivoted"


def compress_prepared(
    calibration: Calibration,
    estimator: Estimator,
    search: Search,
    budget: Budget,
    form: FormName,
    sensitivity: Iterable[Batch] | None = None,
) -> CompressionResult:
    """Compress a prepared network: decompose, allocate, apply, summarise."""
    timing, device = calibration.execution.timing, next(calibration.model.parameters()).device
    estimator = calibration.suited(estimator)
    if sensitivity is None and calibration.data is not None:
        sensitivity = FirstSamples(calibration.data, search.num_samples)
    with stopwatch() as seconds, without_autocast(device):  # which would round the numbers that decide
        table = calibration.latency_table(timing.num_turns, FORMS[form])
        bounds = budget.bounds(calibration, table)
        whole = AllocationProblem(calibration, estimator, {}, bounds, FORMS[form], latency=table)

        def problem_at(current: Calibration, least: float) -> AllocationProblem:
            """Make the problem of the current network, with bounds of at least `least`."""
            nearer = {cost: max(bound, least) for cost, bound in bounds.items()}
            limits = None if current is calibration else replace(whole, bounds=nearer).budget
            decompositions = current.decompositions(estimator)
            return AllocationProblem(
                current, estimator, decompositions, nearer, FORMS[form], limits, table, sensitivity
            )

        rounds = rounds_to(bounds, budget.rounds, bool(calibration.units))
        current, narrowed = narrow_in_rounds(calibration, search, rounds, problem_at)
        problem = problem_at(current, 0)
        with stage("search"):
            allocated = allocate_ranks(problem, search, timing)
        plan = {name: rank or narrowed.get(name) for name, rank in allocated.result.plan.items()}
        methods = estimator, search, form
        summary = summarize(calibration, problem, allocated, plan, bounds, rounds, *methods, dict(seconds))
    return CompressionResult(
        allocated.model,
        plan,
        summary,
        calibration.skipped,
        calibration.model,
        calibration.output_error,
        calibration.held_out,
        replace(whole, sensitivity=sensitivity),
        search,
    )
