"""From a network and a budget to a smaller network."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from facts.calibration.data import Batch, FirstSamples, as_batches
from facts.calibration.distance import distance
from facts.calibration.prepare import Calibration, prepare, refuse_without_weights
from facts.compression.allocation import AllocatedNetwork, allocate_ranks
from facts.compression.budget import Budget
from facts.compression.quality import check_error, smallest_within
from facts.compression.summarize import summarize
from facts.cost.count import CostName
from facts.cost.device_times import DeviceTimes, precision_name
from facts.cost.latency import LatencyTable
from facts.cost.predicted import PredictedLatency
from facts.cost.speed import batch_seconds
from facts.cost.timing import DEFAULT_TIMING, TimingPolicy
from facts.cost.trace import has_row_per_sample
from facts.decomposition.apply import apply_plan
from facts.estimators import ESTIMATORS, Estimator
from facts.modules.forms import FORMS, FormName, refuse_unknown_form
from facts.moments.execution import Execution
from facts.moments.losses import Loss, OutputError, SampledLabels
from facts.moments.memory import DEFAULT_POLICY, MemoryPolicy, within_memory
from facts.refit import REFITS, Refit, RefitProblem
from facts.result import CompressionResult
from facts.saving.hub_methods import with_hub_methods
from facts.search import SEARCHES, AllocationProblem, Search
from facts.search.methods.cors_fisher import CoRSFisher
from facts.search.methods.uniform import Uniform
from facts.utils import distributed
from facts.utils.batches import batch_size, in_parts, to_device
from facts.utils.cache import name_of
from facts.utils.files import ScratchFolder
from facts.utils.registry import by_name
from facts.utils.stopwatch import stage, stopwatch

if TYPE_CHECKING:
    from facts.finetuning import Recovery

log = logging.getLogger(__name__)

NUM_COMPARED = 64  # samples on which the result's outputs are compared with the original's
NUM_TIMED = 16  # samples in the batch on which both networks are timed
QUICK = TimingPolicy(num_turns=3, min_seconds=0.0)


def compress(
    model: nn.Module,
    calibration: Iterable[Any] | None = None,
    *,
    estimator: str | Estimator = "facts",
    search: str | Search | None = None,
    form: FormName | None = None,
    fit_bias: bool = False,
    refit: str | Refit | None = None,
    recover: "Recovery | None" = None,
    ratio: float | None = None,
    flops: float | None = None,
    params: float | None = None,
    latency_ms: float | None = None,
    error: float | None = None,
    cost: CostName = "flops",
    bounds: Mapping[CostName, float] | None = None,
    device_times: DeviceTimes | Path | str | None = None,
    layers: Iterable[str] | None = None,
    convolutions: bool | None = None,
    sensitivity: Iterable[Any] | None = None,
    loss: Loss | None = None,
    output_error: OutputError | None = None,
    precision: torch.dtype = torch.float32,
    memory: MemoryPolicy = DEFAULT_POLICY,
    timing: TimingPolicy = DEFAULT_TIMING,
    input_shape: tuple[int, ...] | None = None,
    cache: Path | str | None = None,
) -> CompressionResult:
    """Compress the linear layers of a copy of `model` until `ratio` of their cost remains. GPT-2's `Conv1D` is one too.

    `calibration` is a loader of `(inputs, targets)`; of mappings of inputs by name, with `labels`; of inputs alone,
    whose labels the network then draws; or, for a language model, of tokens `[N, T]`, unpadded. `facts.CutMix` mixes
    the images of a loader. Methods without data (PELA) need none. `estimator` and `search` are names or instances; the
    default search is `cors_fisher`, or `uniform` without data. `form` is how a layer of rank k is stored: `plain`, two
    factors, or `pivoted`, k of its rows or columns and the others' coefficients on them, which takes fewer weights for
    the same rank, or has a higher rank for the same cost. The default is `pivoted`, but `plain` in half precision,
    where pivots are slower. With `fit_bias` each bias takes up the mean of what truncation takes from its layer's
    outputs, and the factors are centred by it; layers without a bias, and methods without data, stay as they are. A
    `refit` by name or instance then fits the layers anew, block by block or layer by layer, to what the compressed ones
    before them give. With `recover=Recovery(minutes=10)` the original then teaches the compressed network, as
    `facts.recover` does.

    The budget: `ratio` (one half if no bound is given) is the remaining fraction of these layers' `cost`: `flops`,
    `params`, or `latency`, the time of the whole network for one batch of the calibration data on this machine,
    measured by `timing`. `flops`, `params` and `latency_ms` bound the cost of the whole network instead, for one sample
    or one such batch. `bounds` are further ratios, `{"params": 0.6}`. All bounds must hold. With `device_times`, which
    `facts.measure` made on another device, or their file, latency is that of one of their batches on that device: it
    is predicted, and measured nowhere. With `error` the budget is the smallest hundredth of the `cost` at which
    outputs, on the data that a search compares them on, are within this mean error of the original's; it is found by
    bisection, some eight searches on the same decompositions.

    `layers` names the layers, linear or 1x1 convolutions (default: `select_layers`; `convolutions` adds the latter,
    which are taken anyway if there is no linear layer). In the plan, a convolution is called `<name>.linear`. The
    result's `skipped` holds the reason for each layer left alone. A search compares outputs on the batches
    `sensitivity` (default: the first calibration batches, up to `num_samples` of the search), by
    `output_error(original, changed)`, a sum over samples (default: the KL divergence of classes, or, with your own
    `loss`, the relative squared error).
    `loss(outputs, targets)` is the sum over samples of each one's own loss (default: cross-entropy;
    `SampledLabels(loss)` draws labels from the network instead: the true Fisher).

    `precision` is the autocast type of the passes, `memory` the policy if the device's memory is short. FLOPs are
    counted for `input_shape` (default: that of the calibration data). `cache` is a folder for moments, decompositions
    and sensitivities. Processes started by torchrun share the data after `facts.utils.distributed.join()`, and all get
    the same plan. Raises `ValueError` for arguments out of range, for data that the loss does not fit, and for a budget
    that no plan of the search meets. Logs a warning if the outputs are far from the original's.
    """
    refuse_without_weights(model)
    form = form or default_form(model, precision)
    refuse_unknown_form(form)
    if recover is not None and not hasattr(recover, "improve"):
        raise ValueError(f"recover must be a facts.Recovery, such as Recovery(minutes=10), got {recover!r}")
    if recover and calibration is None:
        raise ValueError("recovery needs data to learn from: give calibration")
    if recover and cache and output_error:
        name_of(output_error, "output_error")  # which its checkpoints need, before any work
    estimator = by_name(estimator, ESTIMATORS, "estimator")
    search = by_name(search, SEARCHES, "search") if search else default_search(calibration, loss)
    if refit is not None:
        refit = by_name(refit, REFITS, "refit")
        refit.check(fit_bias, has_data=calibration is not None)
    budget = Budget.of(ratio, cost, bounds, flops=flops, params=params, latency_ms=latency_ms)
    if error is not None:
        others = ratio, bounds, flops, params, latency_ms
        check_error(error, cost, any(others), has_data=calibration is not None)
    scratch = ScratchFolder() if error is not None and cache is None else None  # one decomposition serves all ratios
    if device_times is not None:
        if not budget.bounds_latency:
            raise ValueError("device_times predict a latency, and none is bounded: give latency_ms or cost='latency'")
        if not isinstance(device_times, DeviceTimes):
            device_times = DeviceTimes.read(device_times)
        device_times.refuse_other(form, precision_name(model, precision))
    with stopwatch():
        with stage("preparation"):
            prepared = prepare(
                model,
                calibration,
                layers=layers,
                convolutions=convolutions,
                loss=loss,
                output_error=output_error,
                execution=Execution(precision, memory),
                input_shape=input_shape,
                cache=scratch.path if scratch else cache,
                fit_bias=fit_bias,
            )
        compared = as_batches(sensitivity, model)

        def compress_to(budget: Budget) -> CompressionResult:
            return compress_prepared(prepared, estimator, search, budget, form, compared, timing, refit, device_times)

        def compare_at(ratio: float) -> CompressionResult:
            return with_distance(compress_to(Budget.of(ratio, cost)), prepared, search.num_samples, compared)

        result = compress_to(budget) if error is None else smallest_within(error, cost, compare_at)
        if prepared.data is not None:
            result = with_latency(result, prepared)
            if recover is not None:
                with stage("recovery"):
                    result = recover.improve(result, prepared.data, prepared.folder)
            elif error is None:
                result = with_distance(result, prepared, NUM_COMPARED)
            if result.summary.is_far:
                log.warning("%s; %s", result.summary.distance, result.summary.advice)
    return with_hub_methods(result)


def with_distance(
    result: CompressionResult, calibration: Calibration, num_samples: int, data: Iterable[Batch] | None = None
) -> CompressionResult:
    """Compare the outputs with the original's on some data; by default on so many calibration samples."""
    with stopwatch() as seconds, stage("comparison"):
        first = [inputs for inputs, _ in data or FirstSamples(calibration.data or (), num_samples)]
        networks, error, execution = (calibration.model, result.model), calibration.output_error, calibration.execution
        found = within_memory(partial(distance, *networks, first, error, execution.precision), execution.memory)
    return replace(result, summary=replace(result.summary, distance=found, seconds=dict(seconds)))


def with_latency(result: CompressionResult, calibration: Calibration) -> CompressionResult:
    """Time both networks in turns on a few samples, unless a bounded latency has been measured or predicted already."""
    if result.summary.latency:
        return result
    inputs, execution = calibration.first_inputs, calibration.execution
    if has_row_per_sample(inputs):
        inputs = tree_map_only(Tensor, lambda tensor: tensor[:NUM_TIMED], inputs)
    inputs = to_device(inputs, next(calibration.model.parameters()).device)
    networks = {"dense": calibration.model, "measured": result.model}

    def timed(num_parts: int) -> dict[str, float]:
        part, _ = next(in_parts((inputs, None), num_parts))
        times = distributed.on_main_rank(lambda: batch_seconds(networks, part, QUICK, execution.precision))
        return {name: timing.median for name, timing in times.items()} | {"samples": batch_size(part)}

    with stopwatch() as seconds, stage("latency"):
        latency = within_memory(timed, execution.memory)
    return replace(result, summary=replace(result.summary, latency=latency, seconds=dict(seconds)))


def default_search(calibration: Iterable[Any] | None, loss: Loss | None) -> Search:
    """The best search that takes no more than a second data pass; without data, one that needs none."""
    if calibration is None:
        return Uniform()
    draws = loss is None or isinstance(loss, SampledLabels)  # labels can only be drawn from class logits
    return CoRSFisher(labels="sampled" if draws else "given")


def default_form(model: nn.Module, precision: torch.dtype) -> FormName:
    """Pivoted layers, but plain ones in half precision, where pivots have to be permuted."""
    types = {precision, *(parameter.dtype for parameter in model.parameters())}
    return "plain" if types & {torch.bfloat16, torch.float16} else "pivoted"


def compress_prepared(
    calibration: Calibration,
    estimator: Estimator,
    search: Search,
    budget: Budget,
    form: FormName,
    sensitivity: Iterable[Batch] | None = None,
    timing: TimingPolicy = DEFAULT_TIMING,
    refit: Refit | None = None,
    device_times: DeviceTimes | None = None,
) -> CompressionResult:
    """Compress a network that `prepare` has prepared: decompose, allocate, refit, apply, summarise."""
    with stopwatch() as seconds:
        table: LatencyTable
        if device_times is None:
            table = calibration.latency_table(timing.num_turns, FORMS[form])
        else:
            device_times.refuse_other_network(calibration.cost)
            table = PredictedLatency(device_times, calibration.layers, calibration.rows)
        bounds = budget.bounds(calibration, table)
        decompositions = calibration.decompositions(estimator)
        if sensitivity is None and calibration.data is not None:
            sensitivity = FirstSamples(calibration.data, search.num_samples)
        problem = AllocationProblem(
            calibration, estimator, decompositions, bounds, FORMS[form], latency=table, sensitivity=sensitivity
        )
        with stage("search"):
            allocated = allocate_ranks(problem, search, timing)
        if refit:
            with stage("refit"):
                allocated = refitted(refit, calibration, estimator, problem, allocated)
        summary = summarize(calibration, problem, allocated, estimator, search, form, refit, dict(seconds))
    return CompressionResult(
        allocated.model,
        allocated.result.plan,
        summary,
        calibration.skipped,
        calibration.model,
        calibration.output_error,
    )


def refitted(
    refit: Refit,
    calibration: Calibration,
    estimator: Estimator,
    problem: AllocationProblem,
    allocated: AllocatedNetwork,
) -> AllocatedNetwork:
    """Fit the layers of a plan anew, and make the network of them."""
    plan = allocated.result.plan
    decompositions = refit.fit(RefitProblem(calibration, estimator, plan, dict(allocated.decompositions), problem.form))
    model = apply_plan(calibration.model, decompositions, plan, problem.form, calibration.execution.precision)
    return replace(allocated, model=model, decompositions=decompositions)
