"""Layers cut down to some of their inputs and outputs."""

from torch import Tensor, nn


def slice_parameter(module: nn.Module, name: str, axis: int, kept: Tensor) -> None:
    """Keep the entries `kept` of one axis of a parameter."""
    parameter = getattr(module, name)
    sliced = parameter.detach().index_select(axis, kept.to(parameter.device))
    setattr(module, name, nn.Parameter(sliced, requires_grad=parameter.requires_grad))


def slice_linear(layer: nn.Linear, inputs: Tensor | None = None, outputs: Tensor | None = None) -> None:
    """Keep some inputs and outputs of a linear layer, by index; None keeps all."""
    if inputs is not None:
        slice_parameter(layer, "weight", 1, inputs)
    if outputs is not None:
        slice_parameter(layer, "weight", 0, outputs)
        if layer.bias is not None:
            slice_parameter(layer, "bias", 0, outputs)
    layer.out_features, layer.in_features = layer.weight.shape
