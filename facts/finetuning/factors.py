"""Pivoted layers as plain factors while they are trained."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from facts.decomposition.singular import spectral_factors
from facts.modules.linear_calls import replace_submodule
from facts.modules.lowrank import LowRankLinear
from facts.modules.pivoted import PivotedLinear
from facts.modules.pivots import arithmetic_of, pivoted_layer


@contextmanager
def plain_factors(model: nn.Module) -> Iterator[None]:
    """Replace every pivoted layer by two factors within the block, and the factors by a pivoted layer afterwards.

    Both forms reach the same weights, but a small step of a pivot or a coefficient can be a large step of the weight.
    If the pivots were permuted, new ones are chosen for half precision again. After an error the factors remain.
    """
    pivoted = {name: module for name, module in model.named_modules() if isinstance(module, PivotedLinear)}
    for name, layer in pivoted.items():
        replace_submodule(model, name, _balanced(layer))
    yield
    for name, layer in pivoted.items():
        factors = model.get_submodule(name)
        assert isinstance(factors, LowRankLinear)
        precision = torch.float32 if layer.order is None else torch.bfloat16
        arithmetic = arithmetic_of(factors.left, precision)
        pivots = pivoted_layer(factors.left, factors.right, factors.bias, arithmetic=arithmetic)
        replace_submodule(model, name, pivots)


@torch.no_grad()
def _balanced(layer: PivotedLinear) -> LowRankLinear:
    """The same weight as two factors with equal singular values."""
    left, right = spectral_factors(*(factor.double() for factor in layer.factors()), share=0.5)
    return LowRankLinear(left.to(layer.basis), right.to(layer.basis), layer.bias)
