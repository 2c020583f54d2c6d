"""Application of a rank plan to a network."""

from collections.abc import Mapping

import torch
from torch import nn

from facts.decomposition.parts import Unit, put_units
from facts.decomposition.truncation import Decomposition
from facts.modules.forms import Form
from facts.modules.linear_calls import copy_with, replace_submodule
from facts.modules.lowrank import LowRankLayer, own_parameter
from facts.modules.pointwise import PointwiseConvolution

Plan = dict[str, int | None]
"""Rank of each layer or unit by name; None leaves it dense."""


def apply_plan(
    model: nn.Module,
    decompositions: Mapping[str, Decomposition],
    plan: Plan,
    form: Form,
    precision: torch.dtype = torch.float32,
    units: Mapping[str, Unit] | None = None,
    network: nn.Module | None = None,
) -> nn.Module:
    """Copy the model and replace each layer that has a rank in the plan by a low-rank one, to run in `precision`.

    A 1x1 convolution whose layer stays dense becomes a convolution again. The `units`, which `network` calls as linear
    layers, are narrowed.
    """
    compressed = copy_with(model)
    if units and network:
        put_units(compressed, network, units, decompositions, plan)
    for name, rank in plan.items():
        if rank is not None and name not in (units or {}):
            dense = model.get_submodule(name)
            assert isinstance(dense, nn.Linear)
            replace_submodule(compressed, name, low_rank_layer(dense, decompositions[name], rank, form, precision))
    for name, module in list(compressed.named_modules()):
        if isinstance(module, PointwiseConvolution) and isinstance(module.linear, nn.Linear):
            replace_submodule(compressed, name, module.convolution())
    return compressed


def low_rank_layer(
    dense: nn.Linear, decomposition: Decomposition, rank: int, form: Form, precision: torch.dtype
) -> LowRankLayer:
    """Make the low-rank layer that replaces a dense one; each parameter is trainable if the dense layer's is."""
    layer = form.layer(dense, *decomposition.truncate(rank), precision)
    bias = decomposition.bias(dense, rank)
    layer.bias = None if bias is None else own_parameter(bias)
    layer.requires_grad_(dense.weight.requires_grad)
    if layer.bias is not None:
        layer.bias.requires_grad_(dense.bias.requires_grad)
    return layer
