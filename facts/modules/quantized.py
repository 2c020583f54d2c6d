"""Weights of linear layers as eight-bit or four-bit integers, with one scale per group."""

from math import ceil
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from facts.modules.lowrank import LowRankLayer

Weights = Literal["int8", "int4"]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True))
class Quantization:
    """Quantized weights of a network: their type, group size (None: a whole row) and names."""

    weights: Weights
    group_size: Annotated[int, Field(ge=2)] | None
    tensors: tuple[str, ...]

    def __str__(self) -> str:
        group = "each row" if self.group_size is None else f"groups of {self.group_size}"
        return f"{len(self.tensors)} weights in {self.weights}, one scale for {group}"


class QuantizedWeight(nn.Module):
    """Parametrization of a weight `[d_out, d_in]`: stored integers times the scale of their group.

    A group is `group_size` neighbours in a row. Eight-bit integers are stored unchanged, `[d_out, d_in]`; four-bit ones
    plus 8, two per byte, `[d_out, ceil(d_in / 2)]`. The weight has the type of its `scales`, `[d_out, groups]`.
    """

    scales: Tensor

    def __init__(self, weights: Weights, group_size: int | None, d_in: int, scales: Tensor):
        super().__init__()
        self.weights, self.group_size, self.d_in = weights, group_size, d_in
        self.register_buffer("scales", scales)

    def forward(self, stored: Tensor) -> Tensor:
        num_groups, size = self.scales.shape[1], min(self.group_size or self.d_in, self.d_in)
        integers = F.pad(self._integers(stored), (0, num_groups * size - self.d_in)).unflatten(1, (num_groups, size))
        return (integers * self.scales[:, :, None]).flatten(1)[:, : self.d_in]

    def _integers(self, stored: Tensor) -> Tensor:
        """Unpack the integers `[d_out, d_in]`, four-bit ones as floats: ONNX Runtime cannot shift bytes."""
        if self.weights == "int8":
            return stored
        low, high = (stored & 15).to(self.scales.dtype), (stored & 240).to(self.scales.dtype) / 16
        return torch.stack([low, high], dim=2).flatten(1)[:, : self.d_in] - 8


def packed(integers: Tensor) -> Tensor:
    """Pack integers from -8 to 7, `[d_out, d_in]`, two per byte, as `QuantizedWeight` stores them."""
    shifted = F.pad(integers + 8, (0, integers.shape[1] % 2)).to(torch.uint8)
    return shifted[:, ::2] | shifted[:, 1::2] << 4


def quantize_weight(layer: nn.Module, name: str, stored: Tensor, weight: QuantizedWeight) -> None:
    """Replace a layer's parameter by stored integers; reading it returns the integers times their scales."""
    delattr(layer, name)
    layer.register_buffer(name, stored)  # not a parameter, since integers have no gradients
    register_parametrization(layer, name, weight, unsafe=True)  # it changes the type


def quantized_empty(model: nn.Module, quantization: Quantization) -> nn.Module:
    """Replace weights by empty quantized ones. Raises `ValueError` for a name that is not such a weight."""
    modules = dict(model.named_modules())
    for name in quantization.tensors:
        owner, _, attribute = name.rpartition(".")
        layer = modules.get(owner)
        if layer is None or attribute not in matrices(layer):
            raise ValueError(
                f"the quantization does not fit this {type(model).__name__}: {name!r} is not a weight of a linear "
                "layer, or is named twice; load the network that was quantized"
            )
        weight = matrices(layer)[attribute].detach()
        d_out, d_in = weight.shape
        width, dtype = (d_in, torch.int8) if quantization.weights == "int8" else (ceil(d_in / 2), torch.uint8)
        scales = weight.new_empty(d_out, ceil(d_in / (quantization.group_size or d_in)))
        parametrization = QuantizedWeight(quantization.weights, quantization.group_size, d_in, scales)
        quantize_weight(layer, attribute, weight.new_empty(d_out, width, dtype=dtype), parametrization)
    return model


def matrices(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Find the weights of a linear layer, two if it is low-rank; empty for any other module."""
    if not isinstance(layer, nn.Linear | LowRankLayer):
        return {}
    return {name: parameter for name, parameter in layer.named_parameters(recurse=False) if parameter.ndim == 2}


def quantized_weights(model: nn.Module) -> dict[str, QuantizedWeight]:
    """Find the quantized weights of a network, by their names as tensors."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedWeight):
            owner, attribute = name.removesuffix(".0").split(".parametrizations.")
            found[f"{owner}.{attribute}"] = module
    return found


def quantization_of(model: nn.Module) -> Quantization | None:
    """Find the quantization of a network, or None."""
    if not (weights := quantized_weights(model)):
        return None
    first = next(iter(weights.values()))
    return Quantization(weights=first.weights, group_size=first.group_size, tensors=tuple(weights))
