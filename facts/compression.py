"""From a network and a budget to a smaller network."""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from facts import parallel
from facts.cache import Cache, calibration_key, content_key, name_of
from facts.cost import COST_NAMES, Cost, CostName, count_params, count_pass, count_rows, meta_input
from facts.decomposition import Decomposition, decompose
from facts.estimators import ESTIMATORS, Estimator
from facts.estimators.base import TwoSidedEstimator, see_data
from facts.hardware import DEFAULT_TIMING, TimingPolicy, batch_seconds
from facts.layers import batch_size, select_layers
from facts.losses import Loss, OutputError, kl_divergence, on_given_labels, summed_cross_entropy
from facts.lowrank import LowRankLinear
from facts.memory import DEFAULT_POLICY, MemoryPolicy
from facts.moments.collect import LayerMoments, collect_moments, in_groups
from facts.moments.data_pass import to_device
from facts.names import by_name
from facts.networks import copy_with, noise, reads_tokens, with_linear_layers
from facts.search import SEARCHES, AllocationProblem, Plan, Search, SearchResult
from facts.search.latency import LatencyTable

log = logging.getLogger(__name__)

NUM_SENSITIVITY = 512
LATENCY_TOLERANCE = 0.02  # of a predicted latency: less than the stopwatch's own error
MAX_CORRECTIONS = 2


@dataclass(frozen=True)
class Summary:
    """Cost of the whole network before and after by the paper's rule, and how it went.

    FLOPs are None where no input shape is known. `spent` and `budget` are those of the compressed layers alone, for
    each cost that was bounded. Where latency was, `latency` holds seconds of the whole network on one batch: `dense`
    and `allowed`, those `predicted` for the plan, and those `measured` of it, in turns with the original.
    `solution` is the solver's proof, where the search used one: status, error, bound, gap.
    `profile` lists, by layer, the ranks, their ratios, and the errors there that the search measured or predicted.
    `repaired` counts, by layer, the Kronecker factors that were not positive definite. `seconds` is the time of each
    stage, which for the search includes what earlier searches spent on errors that it found in the cache.
    """

    before: Cost
    after: Cost
    repaired: dict[str, int]
    seconds: dict[str, float]
    spent: dict[str, float] = field(default_factory=dict)
    budget: dict[str, float] = field(default_factory=dict)
    latency: dict[str, float] = field(default_factory=dict)
    solution: dict[str, Any] | None = None
    profile: dict[str, list[list[float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class CompressionResult:
    """A compressed network, the rank (None for dense) of each layer, and the summary."""

    model: nn.Module
    plan: Plan
    summary: Summary


def compress(
    model: nn.Module,
    calibration: Iterable[tuple[Any, Any]] | None = None,
    *,
    estimator: str | Estimator = "facts",
    search: str | Search = "uniform",
    ratio: float = 0.5,
    cost: CostName = "flops",
    bounds: Mapping[CostName, float] | None = None,
    layers: Iterable[str] | None = None,
    sensitivity: Iterable[tuple[Any, Any]] | None = None,
    loss: Loss = summed_cross_entropy,
    output_error: OutputError = kl_divergence,
    precision: torch.dtype = torch.float32,
    memory: MemoryPolicy = DEFAULT_POLICY,
    timing: TimingPolicy = DEFAULT_TIMING,
    input_shape: tuple[int, ...] | None = None,
    cache: Path | str | None = None,
) -> CompressionResult:
    """Compress the linear layers of a copy of `model` until `ratio` of their cost remains. GPT-2's `Conv1D` is one too.

    `calibration` yields `(inputs, targets)`; a method without data (PELA) needs none. `estimator` and `search` are
    names or instances; `cost` is what the ratio speaks of: `flops` or `params` of these layers, or `latency`, the time
    that the whole network takes here for a batch of the calibration data, measured as `timing` says. `bounds` are
    further ratios of the same kind, all of which must hold: `{"params": 0.6}`. `layers` names the layers (default:
    `select_layers`). `sensitivity` are the batches on which a search compares outputs (default: the first
    calibration batches, up to 512 samples), by `output_error(original, changed)`, a sum over samples.
    `loss(outputs, targets)` is the sum over samples of each one's own loss (`SampledLabels(loss)`: factors from labels
    that the network draws, the true Fisher); `precision` is the autocast type of the passes, `memory` what happens
    where the device's is short. `input_shape` is what FLOPs are counted for (default: that of the calibration data).
    `cache` is a folder in which moments, decompositions and sensitivities are kept. Processes that torchrun started
    share the data after `facts.parallel.join()`, and all get the same plan. Raises `ValueError` for arguments out of
    range and for a budget that no plan meets; a search that is not exact and ends above its budget says so in a
    warning.
    """
    estimator = by_name(estimator, ESTIMATORS, "estimator")
    search = by_name(search, SEARCHES, "search")
    bounds = all_bounds(ratio, cost, bounds or {})
    model = with_linear_layers(model)
    selected = select_layers(model, layers)
    if isinstance(calibration, Iterator):
        calibration = list(calibration)  # it is read more than once
    if isinstance(sensitivity, Iterator):
        sensitivity = list(sensitivity)
    if sensitivity is None and calibration is not None:
        sensitivity = FirstSamples(calibration, NUM_SENSITIVITY)
    own = None if calibration is None else parallel.share(calibration)
    inputs = parallel.from_main(lambda: _first_inputs(own))
    example = meta_input(model, input_shape) if input_shape else _example(model, inputs)
    kept = moment_cache(cache, model, selected, calibration, loss, precision) if cache else None

    seconds: dict[str, float] = {}
    with timed(seconds, "decomposition"):
        decompositions = decompose_layers(
            model, selected, calibration, estimator, loss=loss, precision=precision, memory=memory, cache=kept
        )
    rows = _rows(model, selected, example, inputs)
    batch = _batch(model, inputs, input_shape)
    problem = AllocationProblem(
        model=model,
        layers=selected,
        decompositions=decompositions,
        bounds=bounds,
        rows=rows,
        latency=LatencyTable(model, selected, rows, batch, precision, timing.num_turns),
        sensitivity=sensitivity,
        calibration=calibration,
        loss=on_given_labels(loss),
        output_error=output_error,
        precision=precision,
        memory=memory,
        energies_are_losses=isinstance(estimator, TwoSidedEstimator),
        cache=kept and Cache(kept.folder / _file_name(estimator)),
    )
    result, compressed, latency = _search_and_measure(problem, search, timing, seconds)
    seconds["search"] += result.saved_seconds
    summary = Summary(
        before=_cost(model, example),
        after=_cost(compressed, example),
        repaired={name: d.num_repaired for name, d in decompositions.items() if d.num_repaired},
        seconds=seconds,
        spent=dict(zip(bounds, problem.spent(result.plan), strict=True)),
        budget=dict(zip(bounds, problem.budget, strict=True)),
        latency=latency,
        solution=result.solution and {k: v for k, v in asdict(result.solution).items() if k not in ("choices", "cost")},
        profile={
            name: [[rank, rank / problem.full_rank(name), error] for rank, error in sorted(errors.items())]
            for name, errors in result.profile.items()
        },
    )
    return CompressionResult(compressed, result.plan, summary)


def all_bounds(ratio: float, cost: CostName, bounds: Mapping[CostName, float]) -> dict[CostName, float]:
    """The ratio and the further bounds together. Raises `ValueError` for an unknown cost and a ratio out of range."""
    if cost in bounds:
        raise ValueError(f"{cost} is bounded twice, by ratio={ratio} and by bounds={dict(bounds)}: give it once")
    together = {**bounds, cost: ratio}
    for name, value in together.items():
        if name not in COST_NAMES:
            raise ValueError(f"cost must be one of {', '.join(COST_NAMES)}, got {name!r}")
        if not 0 < value <= 1:
            raise ValueError(f"ratio is the fraction that remains and must lie in (0, 1], got {value} for {name}")
    return together


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
    tensors = cache and cache.load(file)
    if None not in parallel.gather(tensors and True):
        return {name: _unpack(tensors, name) for name in layers}
    decompositions = {}
    for names, kept in in_groups(layers, memory, cache):
        settings = {"loss": loss, "precision": precision, "memory": memory, "cache": kept, "only": names}
        collect = partial(collect_moments, model, layers, calibration, **settings)
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
        lambda: {name: decompose_layer(name, layer, estimator, moments[name]) for name, layer in layers.items()}
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
    """A copy of the model in which each planned layer is a `LowRankLinear`."""
    compressed = copy_with(model)
    for name, rank in plan.items():
        if rank is not None:
            dense = model.get_submodule(name)
            left, right = (factor.to(dense.weight.device) for factor in decompositions[name].truncate(rank))
            compressed.set_submodule(name, LowRankLinear(left, right, dense.bias))
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


def _first_inputs(calibration: Iterable[tuple[Any, Any]] | None) -> Any:
    return None if calibration is None else next((inputs for inputs, _ in calibration), None)


def _example(model: nn.Module, inputs: Any) -> Tensor | None:
    """The first sample of a batch on the meta device, where it is a tensor of pixels or of tokens."""
    if isinstance(inputs, Mapping) and reads_tokens(model):
        inputs = inputs[model.main_input_name]
    if isinstance(inputs, Tensor) and (inputs.is_floating_point() or reads_tokens(model)):
        return inputs[:1].to("meta")
    return None


@dataclass(frozen=True)
class FirstSamples:
    """The first batches of some data, until they hold `num_samples`."""

    batches: Iterable[tuple[Any, Any]]
    num_samples: int

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        left = self.num_samples
        for inputs, targets in self.batches:
            yield inputs, targets
            left -= batch_size(inputs)
            if left <= 0:
                return


def _batch(model: nn.Module, inputs: Any, input_shape: tuple[int, ...] | None) -> Any:
    """What latency is measured on: a batch of the data, or noise of the given shape."""
    device = next(model.parameters()).device
    if inputs is not None:
        return to_device(inputs, device)
    return input_shape and noise(model, meta_input(model, input_shape).shape, device)


def _search_and_measure(
    problem: AllocationProblem, search: Search, timing: TimingPolicy, seconds: dict[str, float]
) -> tuple[SearchResult, nn.Module, dict[str, float]]:
    """A plan, its network, and seconds of a batch as in `Summary` where latency is bounded.

    A network that takes longer or shorter than predicted corrects the table of its layers' times, and the search goes
    again.
    """
    for attempt in itertools.count():
        with timed(seconds, "search"):
            result = _search(problem, search)
        compressed = apply_plan(problem.model, problem.decompositions, result.plan)
        if "latency" not in problem.bounds:
            return result, compressed, {}
        with timed(seconds, "search"):
            latency = _latencies(problem, compressed, result.plan, timing)
        shares = {name: f"{value / latency['dense']:.1%}" for name, value in latency.items()}
        log.info("latency: %(predicted)s of the original's predicted, %(measured)s measured", shares)
        if abs(latency["measured"] / latency["predicted"] - 1) <= LATENCY_TOLERANCE or attempt == MAX_CORRECTIONS:
            return result, compressed, latency
        problem.latency.correct(result.plan, latency["measured"])


def _latencies(problem: AllocationProblem, compressed: nn.Module, plan: Plan, timing: TimingPolicy) -> dict[str, float]:
    table, networks = problem.latency, {"dense": problem.model, "compressed": compressed}
    times = parallel.from_main(lambda: batch_seconds(networks, table.inputs, timing, problem.precision))
    return {
        "dense": table.dense,
        "allowed": problem.bounds["latency"] * table.dense,
        "predicted": table.predicted(plan),
        "measured": times["compressed"].ratio(times["dense"]) * table.dense,
    }


def _rows(model: nn.Module, layers: Mapping[str, nn.Linear], example: Tensor | None, inputs: Any) -> dict[str, int]:
    """How many vectors each layer multiplies for one sample; where no input is known, one for all of them."""
    if example is not None:
        return count_rows(model, layers, example)
    if inputs is None:
        return dict.fromkeys(layers, 1)
    rows = count_rows(model, layers, to_device(inputs, next(model.parameters()).device))
    return {name: count // batch_size(inputs) for name, count in rows.items()}


def _cost(model: nn.Module, example: Tensor | None) -> Cost:
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
