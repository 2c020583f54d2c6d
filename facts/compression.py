"""From a network and a budget to a smaller network."""

import copy
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from facts.cache import Cache, calibration_key, content_key
from facts.cost import COST_NAMES, Cost, CostName, count_cost, count_params
from facts.decomposition import Decomposition, decompose
from facts.estimators import ESTIMATORS, Estimator
from facts.layers import select_layers
from facts.lowrank import LowRankLinear
from facts.moments.collect import LayerMoments, Loss, collect_moments, summed_cross_entropy
from facts.names import by_name
from facts.search import SEARCHES, AllocationProblem, Plan, Search


@dataclass(frozen=True)
class Summary:
    """Cost of the whole network before and after by the paper's rule, and how it went.

    FLOPs are None where no input shape is known. `repaired` counts, by layer, the Kronecker factors that were not
    positive definite; `seconds` is the time of each stage.
    """

    before: Cost
    after: Cost
    repaired: dict[str, int]
    seconds: dict[str, float]


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
    layers: Iterable[str] | None = None,
    loss: Loss = summed_cross_entropy,
    precision: torch.dtype = torch.float32,
    input_shape: tuple[int, ...] | None = None,
    cache: Path | str | None = None,
) -> CompressionResult:
    """Compress the linear layers of a copy of `model` until `ratio` of their cost remains.

    `calibration` yields `(inputs, targets)`; a method without data (PELA) needs none. `estimator` and `search` are
    names or instances; `cost` is what the ratio speaks of, `flops` or `params`; `layers` names the layers (default:
    `select_layers`). `loss(outputs, targets)` is the sum over samples of each one's own loss; `precision` is the
    autocast type of the data pass. `input_shape` is what FLOPs are counted for (default: that of the calibration data).
    `cache` is a folder in which moments and decompositions are kept. Raises `ValueError` for arguments out of range.
    """
    estimator = by_name(estimator, ESTIMATORS, "estimator")
    search = by_name(search, SEARCHES, "search")
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is the fraction that remains and must lie in (0, 1], got {ratio}")
    if cost not in COST_NAMES:
        raise ValueError(f"cost must be one of {', '.join(COST_NAMES)}, got {cost!r}")
    selected = select_layers(model, layers)
    if isinstance(calibration, Iterator):
        calibration = list(calibration)  # it is read more than once
    input_shape = input_shape or _shape_of(calibration)

    seconds: dict[str, float] = {}
    with timed(seconds, "decomposition"):
        decompositions = decompose_layers(
            model, selected, calibration, estimator, loss=loss, precision=precision, cache=cache
        )
    with timed(seconds, "search"):
        plan = search.allocate(AllocationProblem(selected, ratio, cost))
    compressed = apply_plan(model, decompositions, plan)
    summary = Summary(
        before=_cost(model, input_shape),
        after=_cost(compressed, input_shape),
        repaired={name: d.num_repaired for name, d in decompositions.items() if d.num_repaired},
        seconds=seconds,
    )
    return CompressionResult(compressed, plan, summary)


def decompose_layers(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    calibration: Iterable[tuple[Any, Any]] | None,
    estimator: Estimator,
    *,
    loss: Loss = summed_cross_entropy,
    precision: torch.dtype = torch.float32,
    cache: Path | str | None = None,
) -> dict[str, Decomposition]:
    """The decomposition of every layer, from the cache where it is there; otherwise moments, factors, SVD."""
    if estimator.moments and calibration is None:
        raise ValueError(f"{type(estimator).__name__} needs calibration data: an iterable of (inputs, targets) batches")
    kept = moment_cache(cache, model, layers, calibration, loss, precision) if cache else None
    file = f"{type(estimator).__name__}-{content_key(estimator)}"
    if kept and (tensors := kept.load(file)):
        return {name: _unpack(tensors, name) for name in layers}
    moments = dict.fromkeys(layers, LayerMoments({}))
    if estimator.moments:
        moments = collect_moments(
            model, layers, calibration, estimator.moments, loss=loss, precision=precision, cache=kept
        )
    decompositions = {name: decompose_layer(name, layer, estimator, moments[name]) for name, layer in layers.items()}
    if kept:
        kept.save(file, {key: tensor for name, d in decompositions.items() for key, tensor in _pack(name, d).items()})
    return decompositions


def decompose_layer(name: str, layer: nn.Linear, estimator: Estimator, moments: LayerMoments) -> Decomposition:
    """One layer's decomposition. Raises `ValueError` with the layer's name."""
    row, col = estimator.shrinkage(moments)
    try:
        return decompose(layer.weight.detach(), estimator.factors(moments), shrinkage_row=row, shrinkage_col=col)
    except (ValueError, torch.linalg.LinAlgError) as error:
        raise ValueError(f"layer {name} cannot be decomposed by {type(estimator).__name__}: {error}") from error


def apply_plan(model: nn.Module, decompositions: Mapping[str, Decomposition], plan: Plan) -> nn.Module:
    """A copy of the model in which each planned layer is a `LowRankLinear`."""
    compressed = copy.deepcopy(model)
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

    Raises `ValueError` for a loss without a name of its own, which could not be told from another one.
    """
    loss_name = getattr(loss, "__qualname__", "<unnamed>")
    if "<" in loss_name:
        raise ValueError("cache= needs a loss with a name of its own: define it as a function at the top of a module")
    data = None if calibration is None else calibration_key(calibration)
    key = content_key(repr(model), model, list(layers), data, loss.__module__, loss_name, precision)
    return Cache(Path(folder) / key)


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the block's wall time to `seconds[stage]`."""
    start = time.perf_counter()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start


def _shape_of(calibration: Iterable[tuple[Any, Any]] | None) -> tuple[int, ...] | None:
    if calibration is None:
        return None
    inputs, _ = next(iter(calibration), (None, None))
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        return (1, *inputs.shape[1:])
    return None


def _cost(model: nn.Module, input_shape: tuple[int, ...] | None) -> Cost:
    return count_cost(model, input_shape) if input_shape else Cost(flops=None, params=count_params(model))


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
