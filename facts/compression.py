"""From a network and a budget to a smaller network."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from facts import parallel
from facts.budget import all_bounds, ratio_of_layers
from facts.cache import Cache, calibration_key, content_key, name_of
from facts.calibration import FirstSamples, as_batches
from facts.cost import Cost, CostName, count_params, count_pass, meta_input
from facts.decomposition import Decomposition, decompose
from facts.estimators import ESTIMATORS, Estimator
from facts.estimators.base import TwoSidedEstimator, see_data
from facts.hardware import DEFAULT_TIMING, TimingPolicy, batch_seconds
from facts.losses import (
    Loss,
    OutputError,
    SampledLabels,
    kl_divergence,
    on_given_labels,
    squared_error,
    summed_cross_entropy,
)
from facts.lowrank import LowRankLinear
from facts.memory import DEFAULT_POLICY, MemoryPolicy
from facts.moments.collect import LayerMoments, collect_moments, in_groups
from facts.moments.data_pass import shown, to_device
from facts.names import by_name
from facts.networks import copy_with, noise, replace
from facts.pointwise import PointwiseConvolution
from facts.result import CompressionResult, Summary
from facts.search import SEARCHES, AllocationProblem, Plan, Search, SearchResult
from facts.search.latency import LatencyTable
from facts.selection import choose_layers, has_row_per_sample

log = logging.getLogger(__name__)

NUM_SENSITIVITY = 512
LATENCY_TOLERANCE = 0.02  # of a predicted latency: less than the stopwatch's own error
MAX_CORRECTIONS = 2


def compress(
    model: nn.Module,
    calibration: Iterable[Any] | None = None,
    *,
    estimator: str | Estimator = "facts",
    search: str | Search = "uniform",
    ratio: float | None = None,
    flops: float | None = None,
    params: float | None = None,
    latency_ms: float | None = None,
    cost: CostName = "flops",
    bounds: Mapping[CostName, float] | None = None,
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
    whose labels the network then draws; or, for a language model, of tokens `[N, T]`, unpadded. A method without data
    (PELA) needs none. `estimator` and `search` are names or instances.

    The budget: `ratio` (a half where no other is given) is the fraction that remains of these layers' `cost`: `flops`,
    `params`, or `latency`, the time that the whole network takes here for a batch of the calibration data, measured as
    `timing` says. `flops`, `params` and `latency_ms` are figures of the whole network instead, for one sample or one
    such batch. `bounds` are further ratios, `{"params": 0.6}`. All of them must hold.

    `layers` names the layers, linear or 1x1 convolutions (default: `select_layers`; `convolutions` adds those, which
    are taken in any case where there is no linear layer). In the plan a convolution has its layer as `<name>.linear`.
    What was left alone, and why, is in the result's `skipped`. `sensitivity` are
    the batches on which a search compares outputs (default: the first calibration batches, up to 512 samples), by
    `output_error(original, changed)`, a sum over samples (default: the KL divergence of classes, or, beside a loss of
    one's own, the relative squared error). `loss(outputs, targets)` is the sum over samples of each one's own loss
    (default: cross-entropy; `SampledLabels(loss)`: factors from labels that the network draws, the true Fisher).

    `precision` is the autocast type of the passes, `memory` what happens where the device's is short. `input_shape` is
    what FLOPs are counted for (default: that of the calibration data). `cache` is a folder in which moments,
    decompositions and sensitivities are kept. Processes that torchrun started share the data after
    `facts.parallel.join()`, and all get the same plan. Raises `ValueError` for arguments out of range, for data to
    which the loss does not fit, and for a budget that no plan meets; a search that is not exact and ends above its
    budget says so in a warning.
    """
    estimator = by_name(estimator, ESTIMATORS, "estimator")
    search = by_name(search, SEARCHES, "search")
    figures: dict[CostName, float | None]
    figures = {"flops": flops, "params": params, "latency": latency_ms and latency_ms / 1000}
    limits = {name: figure for name, figure in figures.items() if figure is not None}
    ratios = all_bounds(ratio, cost, bounds or {}, limits)

    calibration, sensitivity = as_batches(calibration, model), as_batches(sensitivity, model)
    if sensitivity is None and calibration is not None:
        sensitivity = FirstSamples(calibration, NUM_SENSITIVITY)
    own = None if calibration is None else parallel.share(calibration)
    inputs, targets = parallel.from_main(lambda: (None, None) if own is None else next(iter(own), (None, None)))
    if loss is None and targets is None and inputs is not None and getattr(model, "num_classes", None) == 0:
        raise ValueError(f"{type(model).__name__} has no classifier to draw labels from: give targets and a loss")
    if loss is None:
        loss = SampledLabels(summed_cross_entropy) if inputs is not None and targets is None else summed_cross_entropy
    if output_error is None:
        output_error = kl_divergence if on_given_labels(loss) is summed_cross_entropy else squared_error

    chosen = choose_layers(model, layers, convolutions, _example(model, inputs, input_shape), inputs)
    model, selected, rows, example = chosen.model, chosen.layers, chosen.rows, chosen.example
    batch = _batch(model, inputs, input_shape)
    table = LatencyTable(model, selected, rows, batch, precision, timing.num_turns)
    before = _cost(model, example)
    bounds = ratios | _ratios_of(limits, before, selected, rows, table)
    kept = moment_cache(cache, model, selected, calibration, loss, precision) if cache else None

    seconds: dict[str, float] = {}
    with timed(seconds, "decomposition"):
        decompositions = decompose_layers(
            model, selected, calibration, estimator, loss=loss, precision=precision, memory=memory, cache=kept
        )
    problem = AllocationProblem(
        model=model,
        layers=selected,
        decompositions=decompositions,
        bounds=bounds,
        rows=rows,
        latency=table,
        sensitivity=sensitivity,
        calibration=calibration,
        loss=on_given_labels(loss),
        output_error=output_error,
        precision=precision,
        memory=memory,
        energies_are_losses=isinstance(estimator, TwoSidedEstimator),
        cache=kept and Cache(kept.folder / _file_name(estimator)),
    )
    result, compressed, latency = _search_and_measure(problem, table, search, timing, seconds)
    seconds["search"] += result.saved_seconds
    proof = asdict(result.solution) if result.solution else None
    summary = Summary(
        before=before,
        after=_cost(compressed, example),
        repaired={name: d.num_repaired for name, d in decompositions.items() if d.num_repaired},
        seconds=seconds,
        estimator=repr(estimator),
        search=repr(search),
        bounds=bounds,
        spent=dict(zip(bounds, problem.spent(result.plan), strict=True)),
        budget=dict(zip(bounds, problem.budget, strict=True)),
        latency=latency,
        solution=proof and {name: value for name, value in proof.items() if name not in ("choices", "cost")},
        profile={
            name: [
                [rank, rank / problem.full_rank(name), error]
                for rank, error in sorted((rank, error) for rank, error in errors.items() if rank is not None)
            ]
            for name, errors in result.profile.items()
        },
    )
    return CompressionResult(compressed, result.plan, summary, chosen.skipped)


def _ratios_of(
    limits: Mapping[CostName, float],
    before: Cost,
    layers: Mapping[str, nn.Linear],
    rows: Mapping[str, int],
    table: LatencyTable,
) -> dict[CostName, float]:
    """The limits of the whole network as fractions of its layers' cost; a latency is one of the whole already.

    Raises `ValueError` where one cannot be met, or FLOPs are not known.
    """
    ratios: dict[CostName, float] = {}
    for name, limit in limits.items():
        if name == "latency":
            ratios[name] = min(1.0, limit / table.dense)
        elif name == "params":
            own = sum(layer.weight.numel() for layer in layers.values())
            ratios[name] = ratio_of_layers(name, limit, before.params, own)
        elif before.flops is None:
            raise ValueError("the network's FLOPs are not known: give input_shape, or a ratio in the place of flops")
        else:
            own = sum(2 * rows[layer] * layers[layer].weight.numel() for layer in layers)
            ratios[name] = ratio_of_layers(name, limit, before.flops, own)
    return ratios


def _search(problem: AllocationProblem, search: Search) -> SearchResult:
    """The search's plan, or the dense one where that fits."""
    dense: Plan = dict.fromkeys(problem.layers)
    if problem.fits(dense):
        return SearchResult(dense)
    result = parallel.gather(search.allocate(problem))[0]  # what was timed or solved may differ between processes
    for name, spent, budget in zip(problem.bounds, problem.spent(result.plan), problem.budget, strict=True):
        if spent > budget:
            log.warning(
                "%s could not meet the budget: %s of the compressed layers are %.6g, %.2f %% above %.6g",
                type(search).__name__, name, spent, 100 * (spent / budget - 1) if budget else float("inf"), budget,
            )  # fmt: skip
    return result


def decompose_layers(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    calibration: Iterable[tuple[Any, Any]] | None,
    estimator: Estimator,
    *,
    loss: Loss = summed_cross_entropy,
    precision: torch.dtype = torch.float32,
    memory: MemoryPolicy = DEFAULT_POLICY,
    cache: Cache | None = None,
) -> dict[str, Decomposition]:
    """The decomposition of every layer, from the cache where it is there; otherwise moments, factors, SVD.

    Where `memory` says so, for a few layers at a time.
    """
    if estimator.moments and calibration is None:
        raise ValueError(f"{type(estimator).__name__} needs calibration data: an iterable of (inputs, targets) batches")
    file = _file_name(estimator)
    known = cache.load(file) if cache else None
    if all(parallel.gather(known is not None)) and known is not None:
        return {name: _unpack(known, name) for name in layers}
    decompositions: dict[str, Decomposition] = {}
    for names, kept in in_groups(layers, memory, cache):
        settings: dict[str, Any] = {"precision": precision, "memory": memory, "cache": kept, "only": names}
        collect = partial(collect_moments, model, layers, calibration or (), loss=loss, **settings)
        decompositions |= _decompose_group({name: layers[name] for name in names}, estimator, collect)
    if cache:
        tensors = {key: tensor for name, d in decompositions.items() for key, tensor in _pack(name, d).items()}
        parallel.from_main(partial(cache.save, file, tensors))
    return decompositions


def _decompose_group(
    layers: Mapping[str, nn.Linear], estimator: Estimator, collect: Callable[..., dict[str, LayerMoments]]
) -> dict[str, Decomposition]:
    """Moments, factors, SVD; nothing of the moments is left afterwards."""
    moments = dict.fromkeys(layers, LayerMoments({}))
    if estimator.moments:
        estimator, moments = see_data(estimator, collect)
    return parallel.everywhere(
        lambda: {
            name: decompose_layer(name, layer, estimator, moments[name])
            for name, layer in shown(layers.items(), "decomposition")
        }
    )


def _file_name(estimator: Estimator) -> str:
    return f"{type(estimator).__name__}-{content_key(estimator)}"


def decompose_layer(name: str, layer: nn.Linear, estimator: Estimator, moments: LayerMoments) -> Decomposition:
    """One layer's decomposition. Raises `ValueError` with the layer's name."""
    row, col = estimator.shrinkage(moments)
    try:
        return decompose(layer.weight.detach(), estimator.factors(moments), shrinkage_row=row, shrinkage_col=col)
    except (ValueError, torch.linalg.LinAlgError) as error:
        raise ValueError(f"layer {name} cannot be decomposed by {type(estimator).__name__}: {error}") from error


def apply_plan(model: nn.Module, decompositions: Mapping[str, Decomposition], plan: Plan) -> nn.Module:
    """A copy of the model in which each planned layer is a `LowRankLinear`; convolutions left dense are such again."""
    compressed = copy_with(model)
    for name, rank in plan.items():
        if rank is not None:
            dense = model.get_submodule(name)
            left, right = (factor.to(dense.weight.device) for factor in decompositions[name].truncate(rank))
            replace(compressed, name, LowRankLinear(left, right, dense.bias))
    for name, module in list(compressed.named_modules()):
        if isinstance(module, PointwiseConvolution) and isinstance(module.linear, nn.Linear):
            replace(compressed, name, module.convolution())
    return compressed


def moment_cache(
    folder: Path | str,
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    calibration: Iterable[tuple[Any, Any]] | None,
    loss: Loss,
    precision: torch.dtype,
) -> Cache:
    """The part of a cache folder that belongs to this model, these layers, data, loss and precision.

    Raises `ValueError` for a loss without a name of its own.
    """
    data = None if calibration is None else calibration_key(calibration)
    key = content_key(repr(model), model, list(layers), data, name_of(loss, "loss"), precision)
    return Cache(Path(folder) / key)


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the block's wall time to `seconds[stage]`."""
    start = time.perf_counter()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start


def _example(model: nn.Module, inputs: Any, input_shape: tuple[int, ...] | None) -> Any:
    """An input of the given shape on the meta device; or a batch's first sample; None where there is no telling."""
    if input_shape:
        return meta_input(model, input_shape)
    if inputs is None or not has_row_per_sample(inputs):
        return None
    return tree_map_only(Tensor, lambda tensor: tensor[:1].to("meta"), inputs)


def _batch(model: nn.Module, inputs: Any, input_shape: tuple[int, ...] | None) -> Any:
    """What latency is measured on: a batch of the data, or noise of the given shape."""
    device = next(model.parameters()).device
    if inputs is not None:
        return to_device(inputs, device)
    return input_shape and noise(model, meta_input(model, input_shape).shape, device)


def _search_and_measure(
    problem: AllocationProblem, table: LatencyTable, search: Search, timing: TimingPolicy, seconds: dict[str, float]
) -> tuple[SearchResult, nn.Module, dict[str, float]]:
    """A plan, its network, and seconds of a batch as in `Summary` where latency is bounded.

    A network that takes longer or shorter than predicted corrects the table of its layers' times, and the search goes
    again.
    """
    num_corrections = 0
    while True:
        with timed(seconds, "search"):
            result = _search(problem, search)
        compressed = apply_plan(problem.model, problem.decompositions, result.plan)
        if "latency" not in problem.bounds:
            return result, compressed, {}
        with timed(seconds, "search"):
            latency = _latencies(problem, table, compressed, result.plan, timing)
        shares = {name: f"{value / latency['dense']:.1%}" for name, value in latency.items()}
        log.info("latency: %(predicted)s of the original's predicted, %(measured)s measured", shares)
        deviation = abs(latency["measured"] / latency["predicted"] - 1)
        if deviation <= LATENCY_TOLERANCE or num_corrections == MAX_CORRECTIONS:
            return result, compressed, latency
        table.correct(result.plan, latency["measured"])
        num_corrections += 1


def _latencies(
    problem: AllocationProblem, table: LatencyTable, compressed: nn.Module, plan: Plan, timing: TimingPolicy
) -> dict[str, float]:
    networks = {"dense": problem.model, "compressed": compressed}
    times = parallel.from_main(lambda: batch_seconds(networks, table.inputs, timing, problem.precision))
    return {
        "dense": table.dense,
        "allowed": problem.bounds["latency"] * table.dense,
        "predicted": table.predicted(plan),
        "measured": times["compressed"].ratio(times["dense"]) * table.dense,
    }


def _cost(model: nn.Module, example: Any) -> Cost:
    return Cost(flops=None, params=count_params(model)) if example is None else count_pass(model, example)


def _pack(name: str, decomposition: Decomposition) -> dict[str, Tensor]:
    return {
        f"{name}/left": decomposition.left,
        f"{name}/right": decomposition.right,
        f"{name}/energies": decomposition.energies,
        f"{name}/num_repaired": torch.tensor(decomposition.num_repaired),
    }


def _unpack(tensors: Mapping[str, Tensor], name: str) -> Decomposition:
    left, right, energies, num_repaired = (
        tensors[f"{name}/{field}"] for field in ("left", "right", "energies", "num_repaired")
    )
    return Decomposition(left, right, energies, int(num_repaired))
