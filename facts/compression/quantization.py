"""Quantization of the weights of linear layers, low-rank ones included."""

import importlib
from collections import Counter
from dataclasses import replace
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facts.compression.comparison import compared
from facts.cost.count import Cost, Size, count_params
from facts.decomposition.singular import spectral_factors
from facts.modules.linear_calls import copy_with, replace_submodule
from facts.modules.lowrank import LowRankLinear, linear_layer
from facts.modules.pivoted import PivotedLinear
from facts.modules.pivots import pivoted_layer
from facts.modules.pointwise import PointwiseConvolution
from facts.modules.quantized import QuantizedWeight, Weights, matrices, packed, quantization_of, quantize_weight
from facts.result import CompressionResult, Summary
from facts.utils.extras import needing
from facts.utils.silence import silence

GROUP_SIZES: dict[Weights, int | None] = {"int8": None, "int4": 32}


def quantize(
    compressed: CompressionResult | nn.Module, weights: Weights = "int8", group_size: int | None = None
) -> CompressionResult:
    """Store the weights of a network's linear layers, low-rank ones included, as 8-bit or 4-bit integers.

    torchao rounds them. `group_size` neighbours in a row of `[d_out, d_in]` share a scale (default: a whole row for
    `int8`, 32 for `int4`), the group's largest absolute value / 127.5 or / 7.5; no weight changes by more than half of
    it. Products are in floating point, so the network gets smaller, not faster. Biases, norms, embeddings,
    convolutions, layers with one input and shared weights stay unchanged. Pivoted layers are rewritten first, since
    rounding could change their product a lot: with other pivots for `int8`; for `int4` as two factors or dense, and
    then FLOPs are unknown. The result is a copy that can be saved and exported, but not trained. Raises
    `ModuleNotFoundError` without `facts[quantization]`, and `ValueError` for a network that is already quantized, is
    not in float32, or has nothing to round.
    """
    if weights not in get_args(Weights):
        raise ValueError(f"weights must be one of {', '.join(get_args(Weights))}, got {weights!r}")
    if group_size is not None and (not isinstance(group_size, int) or group_size < 2):
        raise ValueError(f"group_size must be an integer of at least 2, or None for the default, got {group_size!r}")
    with needing("quantization", "quantization"), silence():  # PyTorch logs that torchao uses an old name
        importlib.import_module("torchao.quantization")
    if isinstance(compressed, CompressionResult):
        result = compressed
    else:
        cost = Cost(None, count_params(compressed))
        result = CompressionResult(compressed, {}, Summary(cost, cost, repaired={}, seconds={}))
    if found := quantization_of(result.model):
        raise ValueError(f"the network is already quantized ({found}): quantize the network it was made from")
    _own_weights(result.model)  # refuses before the next line's work
    result = _exact_after_rounding(result, weights)
    group_size = group_size or GROUP_SIZES[weights]
    for name, weight in _own_weights(result.model).items():
        owner, _, attribute = name.rpartition(".")
        integers, scales = _rounded(weight.detach(), weights, group_size or weight.shape[1])
        stored = packed(integers) if weights == "int4" else integers
        parametrization = QuantizedWeight(weights, group_size, weight.shape[1], scales)
        quantize_weight(result.model.get_submodule(owner), attribute, stored, parametrization)
    sizes = result.summary.sizes[0], Size.of(result.model)
    summary = replace(result.summary, sizes=sizes, latency={}, predicted=None, distance=compared(result, torch.float32))
    return replace(result, summary=summary, original=None, output_error=None, held_out=None, problem=None)


def _own_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Find the weights of linear layers, by name, that no other module uses: an embedding may share a classifier's.

    Raises `ValueError` if there are none, or if one cannot be rounded.
    """
    uses = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    weights = {
        f"{name}.{attribute}": weight
        for name, module in model.named_modules()
        for attribute, weight in matrices(module).items()
        if weight.numel() and weight.shape[1] > 1 and uses[id(weight)] == 1
    }
    if not weights:
        raise ValueError(f"{type(model).__name__} has no linear layer with a weight of its own: nothing to quantize")
    for name, weight in weights.items():
        if weight.dtype != torch.float32:
            raise ValueError(f"only float32 can be quantized, but {name} is {weight.dtype}: quantize `model.float()`")
        if not weight.isfinite().all():
            raise ValueError(f"{name} contains NaN or infinity: only finite weights can be quantized")
    return weights


def _exact_after_rounding(result: CompressionResult, weights: Weights) -> CompressionResult:
    """Copy the network with the same products, but pivoted layers that lose little by rounding."""
    model, plan, summary = copy_with(result.model), dict(result.plan), result.summary
    pivoted = {name: layer for name, layer in model.named_modules() if isinstance(layer, PivotedLinear)}
    for name, layer in pivoted.items():
        is_convolution = isinstance(model.get_submodule(name.rpartition(".")[0]), PointwiseConvolution)
        rewritten = _rewritten(layer, weights, can_be_dense=not is_convolution)
        replace_submodule(model, name, rewritten)
        if name in plan and isinstance(rewritten, nn.Linear):
            plan[name] = None
    if pivoted and weights == "int4":
        summary = replace(summary, form="plain", after=Cost(None, count_params(model)), spent={}, full_flops=None)
    return replace(result, model=model, plan=plan, summary=summary)


@torch.no_grad()
def _rewritten(layer: PivotedLinear, weights: Weights, can_be_dense: bool) -> nn.Module:
    left, right = spectral_factors(*(factor.double() for factor in layer.factors()), share=0)
    if weights == "int8":  # bfloat16 has eight significant bits too; pivots are compared with factors of this precision
        return pivoted_layer(left, right, layer.bias, torch.float32, arithmetic=torch.bfloat16)
    if can_be_dense and left.numel() + right.numel() >= layer.in_features * layer.out_features:
        return linear_layer((left @ right).float(), layer.bias)
    return LowRankLinear(left.float(), right.float(), layer.bias)


def _rounded(weight: Tensor, weights: Weights, group_size: int) -> tuple[Tensor, Tensor]:
    """Round to integers `[d_out, d_in]` in int8 and scales `[d_out, number of groups]`, with torchao."""
    from torchao.quantization import IntxUnpackedToInt8Tensor

    d_in = weight.shape[1]
    group_size = min(group_size, d_in)
    whole = F.pad(weight, (0, -d_in % group_size))  # zeros change no group's largest value
    tensor = IntxUnpackedToInt8Tensor.from_hp(whole, (1, group_size), getattr(torch, weights))
    return tensor.qdata[:, :d_in].contiguous(), tensor.scale
