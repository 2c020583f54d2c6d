"""Biases that take up the mean of what truncation takes from a layer's outputs."""

from dataclasses import replace

import torch
from torch import Tensor

from facts.estimators.base import KroneckerFactors
from facts.moments.statistics import at_least_tiny


def centred(factors: KroneckerFactors, mean: Tensor) -> tuple[KroneckerFactors, Tensor]:
    """Factors that leave a layer's mean input to its bias, and that mean `[n]`, in float64.

    Those given are of inputs `[x, 1]`, A = [[S, a], [aᵀ, c]]. The change of the bias that costs least beside ΔW is
    -ΔW a / c; the cost that remains has S - a aᵀ / c in place of A. A diagonal A says nothing of means: then `mean`, of
    all inputs, is taken, and A is not centred.
    """
    if factors.A is None:
        return factors, mean.double()
    whole = factors.A.double()
    inner, joint, one = whole[:-1, :-1], whole[:-1, -1], at_least_tiny(whole[-1, -1])
    if not joint.any():
        return replace(factors, A=inner), mean.double()
    return replace(factors, A=inner - torch.outer(joint, joint) / one), joint / one


def uncentred(factors: KroneckerFactors) -> KroneckerFactors:
    """Factors of inputs x alone from those of inputs `[x, 1]`."""
    return factors if factors.A is None else replace(factors, A=factors.A[:-1, :-1])
