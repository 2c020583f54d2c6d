"""Operator cosine similarity of the empirical Fisher and a Kronecker product (paper, supplement on the comparison)."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from facts.estimators import KroneckerFactors


@dataclass(frozen=True)
class Estimate:
    """A value estimated from random probes, and its standard error."""

    value: float
    standard_error: float


def probe_terms(products: Tensor, probes: Tensor, factors: KroneckerFactors) -> Tensor:
    """Compute ⟨F V, F̂ V⟩, ‖F V‖² and ‖F̂ V‖² of each probe V, with F̂ V = B V A: `[K, 3]` in float64.

    `products` `[K, m, n]` are F V, `probes` `[K, m, n]` are V. F V and the factors are divided by their norms, which
    leaves the cosine unchanged. Raises `ValueError` if one of them is zero.
    """
    approximate = probes
    if factors.B is not None:
        approximate = _unit(factors.B.to(probes)) @ approximate
    if factors.A is not None:
        approximate = approximate @ _unit(factors.A.to(probes))
    exact = _unit(products)
    pairs = ((exact, approximate), (exact, exact), (approximate, approximate))
    return torch.stack([(a * b).sum(dim=(1, 2), dtype=torch.float64) for a, b in pairs], dim=1).cpu()


def cosine(layers: Iterable[Tensor]) -> Estimate:
    """The mean over layers of mean ⟨F V, F̂ V⟩ / √(mean ‖F V‖² · mean ‖F̂ V‖²), from each layer's terms `[K, 3]`.

    The standard error is that of the linearised ratio (delta method), for layers with the same probes.
    """
    values, influences = [], []
    for terms in layers:
        both, exact, approximate = terms.mean(dim=0)
        value = both / (exact * approximate).sqrt()
        values.append(value)
        influences.append(value * (terms @ torch.stack([1 / both, -0.5 / exact, -0.5 / approximate])))
    return _estimate(torch.stack(values).mean(), torch.stack(influences).mean(dim=0))


def norm_ratio(first: Tensor, second: Tensor) -> Estimate:
    """√(mean ‖P V‖² / mean ‖Q V‖²), an estimate of ‖P‖_F / ‖Q‖_F, from the products of P and of Q, `[K, m, n]`."""
    squares = torch.stack([each.double().square().sum(dim=(1, 2)).cpu() for each in (first, second)], dim=1)
    above, below = squares.mean(dim=0)
    if above == 0:
        return Estimate(0.0, 0.0)
    value = (above / below).sqrt()
    influence = value / 2 * (squares @ torch.stack([1 / above, -1 / below]))
    return _estimate(value, influence)


def _estimate(value: Tensor, influence: Tensor) -> Estimate:
    return Estimate(value.item(), (influence.std() / len(influence) ** 0.5).item())


def _unit(matrix: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(matrix, dtype=torch.float64)  # float32 may not hold its square
    if norm == 0:
        raise ValueError("the cosine is not defined: a layer's gradients, or an estimator's factor, are all zero")
    return matrix / norm.to(matrix.dtype)
