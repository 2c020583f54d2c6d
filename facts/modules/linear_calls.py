"""Networks rewritten as calls to linear layers."""

import copy
import sys
from collections.abc import Collection, Mapping

from torch import Tensor, nn

from facts.modules.attention import LinearAttention, can_be_linear
from facts.modules.lowrank import linear_layer
from facts.modules.pointwise import PointwiseConvolution


def copy_with(model: nn.Module, replaced: Mapping[Tensor, Tensor] | None = None) -> nn.Module:
    """Copy a network with some tensors replaced; the copy shares the tokenizer."""
    known = {id(original): other for original, other in (replaced or {}).items()}
    tokenizer = getattr(model, "tokenizer", None)
    return copy.deepcopy(model, known | {id(tokenizer): tokenizer})


def skeleton(model: nn.Module) -> nn.Module:
    """Copy a network to the meta device, without copying its weights."""
    weights = {parameter: nn.Parameter(parameter.detach().to("meta"), False) for parameter in model.parameters()}
    buffers = {buffer: buffer.to("meta") for buffer in model.buffers()}
    return copy_with(model, weights | buffers).to("meta")


def with_linear_layers(model: nn.Module, convolutions: Collection[str] = ()) -> nn.Module:
    """Make a copy that computes the same with calls to `nn.Linear`, or return the network itself if nothing changes.

    GPT-2's `Conv1D` becomes a linear layer with the weight transposed, each of the named 1x1 `convolutions` gets one,
    and PyTorch's own attention gets four. timm's attentions that read `qkv.weight` (BEiT, EVA, SwinV2) call `qkv`
    instead. All weights except the transposed ones are shared.
    """
    library = sys.modules.get("transformers.pytorch_utils")  # a network with such a layer has imported it
    transposed = [name for name, module in model.named_modules() if library and isinstance(module, library.Conv1D)]
    uncalled = [name for name, module in model.named_modules() if getattr(module, "qkv_bias_separate", None) is False]
    attention = {name: module for name, module in model.named_modules() if can_be_linear(module)}
    if not (transposed or uncalled or attention or convolutions):
        return model
    model = copy_with(model, {tensor: tensor for tensor in (*model.parameters(), *model.buffers())})
    for name in transposed:
        layer = model.get_submodule(name)
        replace_submodule(model, name, linear_layer(layer.weight.T.contiguous(), layer.bias))
    for name in uncalled:
        model.get_submodule(name).qkv_bias_separate = True  # type: ignore[assignment]
    for name, original in attention.items():
        replace_submodule(model, name, LinearAttention(original))
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # only attention that calls no layers supports it
    for name in convolutions:
        convolution = model.get_submodule(name)
        assert isinstance(convolution, nn.Conv2d)
        replace_submodule(model, name, PointwiseConvolution(convolution))
    return model


def replace_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace a submodule by another module, under all its names."""
    original = model.get_submodule(name)
    module.train(original.training)
    for place in [place for place, each in model.named_modules(remove_duplicate=False) if each is original]:
        model.set_submodule(place, module)
