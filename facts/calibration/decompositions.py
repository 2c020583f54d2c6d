"""Decompositions of all linears, with biases that absorb the mean, and how they are cached."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from facts.decomposition.truncation import Decomposition
from facts.estimators.base import Estimator, KroneckerFactors
from facts.modules.lowrank import LinearLayer
from facts.moments.collect import LayerMoments
from facts.moments.statistics import InputSum, at_least_tiny
from facts.parts import Part
from facts.parts.base import Problem, packed, unpacked
from facts.utils.cache import Cache, code_of, content_key
from facts.utils.progress import with_progress


def decompose_layers(
    layers: Mapping[str, LinearLayer],
    parts: Mapping[str, Part],
    estimator: Estimator,
    moments: Mapping[str, LayerMoments],
    append_one: Collection[str] = (),
) -> dict[str, Decomposition]:
    """Decompose each layer in the way of its part; moments of layers in `append_one` are of `[x, 1]`.

    Raises `ValueError` with the name of a layer that cannot be decomposed.
    """
    found: dict[str, Decomposition] = {}
    for names in with_progress(list(_together(layers, parts)), "decomposition"):
        problems = {name: _problem(name, layers[name], estimator, moments[name], name in append_one) for name in names}
        found |= _decomposed(parts[names[0]], problems, type(estimator).__name__)
    return {name: found[name] for name in layers}


def _together(layers: Mapping[str, LinearLayer], parts: Mapping[str, Part]) -> Iterator[list[str]]:
    """Divide the layers into groups that are decomposed together."""
    alike: dict[Any, list[str]] = defaultdict(list)
    for name, layer in layers.items():
        alike[type(parts[name]), layer.in_features, layer.out_features].append(name)
    for names in alike.values():
        size = parts[names[0]].num_together(layers[names[0]])
        yield from (names[start : start + size] for start in range(0, len(names), size))


def _decomposed(part: Part, problems: Mapping[str, Problem], method: str) -> dict[str, Decomposition]:
    try:
        return dict(zip(problems, part.decompose_together(list(problems.values())), strict=True))
    except (ValueError, torch.linalg.LinAlgError) as error:
        if len(problems) > 1:
            return {name: _decomposed(part, {name: each}, method)[name] for name, each in problems.items()}
        raise ValueError(f"layer {next(iter(problems))} cannot be decomposed by {method}: {error}") from error


def _problem(name: str, layer: LinearLayer, estimator: Estimator, moments: LayerMoments, fit_bias: bool) -> Problem:
    row, col = estimator.shrinkage(moments)
    factors = estimator.factors(moments)
    d_out, d_in = layer.out_features, layer.in_features
    for side, factor, size in (("A", factors.A, d_in + fit_bias), ("B", factors.B, d_out)):
        if factor is not None and factor.shape != (size, size):
            made = f"{type(estimator).__name__} gives {side} {list(factor.shape)} for layer {name}"
            raise ValueError(f"{made}; it must be [{size}, {size}], or None for the identity")
    if fit_bias and layer.bias is None:
        factors = factors if factors.A is None else replace(factors, A=factors.A[:-1, :-1])
    elif fit_bias:
        factors = centred(factors, moments[InputSum()][0][:-1] / moments.num_tokens)
    for weight in layer.parameters():
        if weight.is_complex() or not (weight.is_meta or weight.isfinite().all()):
            reason = "its weight is complex, or holds NaN or infinity"
            raise ValueError(f"layer {name} cannot be decomposed by {type(estimator).__name__}: {reason}")
    return layer, factors, row, col


def centred(factors: KroneckerFactors, mean: Tensor) -> KroneckerFactors:
    """Centre factors, leaving a layer's mean input to its bias; return them with that mean, in float64.

    The given factors are of inputs `[x, 1]`, A = [[S, a], [aᵀ, c]]. The best change of the bias for a ΔW is -ΔW a / c;
    the remaining cost has S - a aᵀ / c in place of A. A diagonal A contains no mean: it is not centred, and `mean`,
    that of all inputs, is used.
    """
    if factors.A is None:
        return replace(factors, mean=mean.double())
    whole = factors.A.double()
    inner, joint, one = whole[:-1, :-1], whole[:-1, -1], at_least_tiny(whole[-1, -1])
    if not joint.any():
        return replace(factors, A=inner, mean=mean.double())
    return replace(factors, A=inner - torch.outer(joint, joint) / one, mean=joint / one)


def file_name(estimator: Estimator) -> str:
    """Name of the files with an estimator's decompositions and what is computed from them."""
    return f"{type(estimator).__name__}-{content_key(estimator, code_of(type(estimator)))}"


def are_decomposed(cache: Cache | None, estimator: Estimator) -> bool:
    return cache is not None and cache.has(file_name(estimator))


def load_decompositions(
    cache: Cache | None, estimator: Estimator, linears: Mapping[str, LinearLayer]
) -> dict[str, Decomposition] | None:
    """Load the decompositions from the cache to the devices of their layers; None if they are not there."""
    tensors = cache.load(file_name(estimator)) if cache else None
    if tensors is None:
        return None
    by_name: dict[str, dict[str, Tensor]] = {name: {} for name in linears}
    for key, tensor in tensors.items():
        name, _, field = key.rpartition("/")
        by_name[name][field] = tensor if not tensor.ndim else tensor.to(next(linears[name].parameters()).device)
    return {name: unpacked(fields) for name, fields in by_name.items()}


def save_decompositions(cache: Cache | None, estimator: Estimator, decompositions: Mapping[str, Decomposition]) -> None:
    if cache:
        fields = {f"{name}/{field}": each for name, d in decompositions.items() for field, each in packed(d).items()}
        cache.save(file_name(estimator), fields)
