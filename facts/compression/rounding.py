"""Rounding of a compressed network to the type in which it is stored."""

from dataclasses import replace

import torch

from facts.compression.comparison import compared
from facts.cost.count import Size
from facts.modules.linear_calls import copy_with
from facts.result import CompressionResult


def rounded(result: CompressionResult, dtype: torch.dtype) -> CompressionResult:
    """Round the weights to `dtype`. The network still computes in its own type, and is stored without further loss.

    A network that already has this type is returned unchanged.
    """
    if all(tensor.dtype == dtype for tensor in result.model.parameters() if tensor.is_floating_point()):
        return result
    model = copy_with(result.model)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(tensor.to(dtype))
    before, after = (Size.of(network, dtype) for network in (result.original or model, model))
    result = replace(result, model=model)
    summary = replace(result.summary, distance=compared(result, torch.float32), sizes=(before, after))
    return replace(result, summary=summary)
