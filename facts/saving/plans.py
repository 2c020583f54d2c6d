"""Networks with the empty low-rank layers of a plan, and empty quantized weights, for the tensors of a file."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from facts.decomposition.apply import Plan
from facts.modules.linear_calls import replace_submodule, with_linear_layers
from facts.modules.lowrank import LowRankLinear
from facts.modules.pivoted import Layout, PivotedLinear
from facts.modules.pointwise import is_pointwise
from facts.modules.quantized import Quantization, quantized_empty


def with_plan(
    dense: nn.Module, plan: Plan, layouts: Mapping[str, Layout], quantization: Quantization | None
) -> nn.Module:
    """Replace layers by empty low-rank ones as planned, 1x1 convolutions included, under all names of each layer.

    `layouts` are those of pivoted layers; the others are plain. Weights are quantized last.
    Raises `ValueError` for a layer or weight that is missing or not linear, and for a rank that it cannot have.
    """
    modules = dict(dense.named_modules())
    convolutions = {name.removesuffix(".linear") for name in plan if name.endswith(".linear")}
    convolutions = {name for name in convolutions if name in modules and is_pointwise(modules[name])}
    model = with_linear_layers(dense, [name for name in convolutions if plan[f"{name}.linear"] is not None])
    modules = dict(model.named_modules())
    for name, rank in plan.items():
        if name.removesuffix(".linear") in convolutions and rank is None:
            continue
        layer = modules.get(name)
        if not isinstance(layer, nn.Linear):
            found = "there is none of that name" if layer is None else f"it is of type {type(layer).__name__}"
            raise ValueError(
                f"the plan does not fit this {type(model).__name__}: {name!r} is no linear layer ({found}); load the "
                "network that was compressed"
            )
        largest = min(layer.in_features, layer.out_features)
        if rank is not None and rank > largest:
            raise ValueError(
                f"the plan does not fit this {type(model).__name__}: rank {rank} of {name!r}, which is "
                f"{layer.out_features} x {layer.in_features}, may be {largest} at most; load the network that was "
                "compressed"
            )
        if rank is not None:
            layout = layouts.get(name)
            empty = PivotedLinear.empty(layer, rank, layout) if layout else LowRankLinear.empty(layer, rank)
            replace_submodule(model, name, empty)
    return quantized_empty(model, quantization) if quantization else model


def layouts_of(model: nn.Module) -> dict[str, Layout]:
    """Layouts of the pivoted layers."""
    return {name: module.layout for name, module in model.named_modules() if isinstance(module, PivotedLinear)}


def refuse_non_permutations(model: nn.Module, file: Path) -> None:
    """Raises `ValueError` for a pivoted layer, read from `file`, whose `order` is no permutation."""
    for name, module in model.named_modules():
        order = module.order if isinstance(module, PivotedLinear) else None
        if order is not None and not order.sort().values.equal(torch.arange(len(order), device=order.device)):
            raise ValueError(f"{file}: {name}.order is no permutation; save or fetch the network again")
