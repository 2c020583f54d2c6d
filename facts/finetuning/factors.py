"""Pivoted layers as plain factors while they are trained."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from facts.modules.linear_calls import replace_submodule
from facts.modules.lowrank import LowRankLinear
from facts.modules.pivoted import PivotedLinear
from facts.modules.pivots import pivoted_layer


@contextmanager
def plain_factors(model: nn.Module) -> Iterator[None]:
    """Replace every pivoted layer by two factors within the block, and the factors by a pivoted layer afterwards.

    Both forms reach the same weights, but a small step of a pivot or a coefficient can be a large one of the weight.
    """
    pivoted = {name: module for name, module in model.named_modules() if isinstance(module, PivotedLinear)}
    for name, layer in pivoted.items():
        replace_submodule(model, name, _balanced(layer))
    try:
        yield
    finally:
        for name in pivoted:
            factors = model.get_submodule(name)
            assert isinstance(factors, LowRankLinear)
            replace_submodule(model, name, pivoted_layer(factors.left, factors.right, factors.bias))


@torch.no_grad()
def _balanced(layer: PivotedLinear) -> LowRankLinear:
    """The same weight as two factors with equal singular values."""
    left, right = (factor.double() for factor in layer.factors())
    u, s, vh = torch.linalg.svd(left @ right, full_matrices=False)
    root = s[: layer.rank].sqrt()
    left, right = u[:, : layer.rank] * root, root[:, None] * vh[: layer.rank]
    return LowRankLinear(left.to(layer.basis), right.to(layer.basis), layer.bias)
