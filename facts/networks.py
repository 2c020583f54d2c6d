"""What networks take and give: images go in as they are, tokens as transformers wants them."""

import copy
import sys
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter, tree_map_only

from facts.attention import LinearAttention, can_be_linear
from facts.linear import linear_layer
from facts.pointwise import PointwiseConvolution

NOT_COMPUTED_BY = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}


def run(model: nn.Module, inputs: Any) -> Any:
    """The network's outputs; of one of transformers its logits, if it has any, made without a cache of keys and values.

    Such a network gets a mapping of inputs by name.
    """
    if not is_transformers(model):
        return model(inputs)
    settings = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    with FakeTensorMode(allow_non_fake_inputs=True) if _on_meta(inputs) else nullcontext() as fake:
        if fake:  # it would ask for values, but not of a tensor that says it has none
            inputs = tree_map_only(Tensor, fake.from_tensor, inputs)
        outputs = model(**inputs, **settings) if isinstance(inputs, Mapping) else model(inputs, **settings)
    return outputs.get("logits", outputs)


def is_transformers(model: nn.Module) -> bool:
    return hasattr(model, "main_input_name")


def reads_tokens(model: nn.Module) -> bool:
    """Whether its inputs are numbers of tokens: whole ones, `[N, T]`."""
    return is_transformers(model) and model.main_input_name == "input_ids"


def settings_of(model: nn.Module) -> dict[str, Any]:
    """What a network of transformers computes by besides its weights: heads, windows, rotations; else nothing."""
    settings = model.config.to_diff_dict() if is_transformers(model) else {}
    return {name: settings[name] for name in sorted(settings.keys() - NOT_COMPUTED_BY)}


def continues_text(model: nn.Module) -> bool:
    """Whether it is a language model that predicts each token from those before."""
    return reads_tokens(model) and model.can_generate() and not is_encoder_decoder(model)


def is_encoder_decoder(model: nn.Module) -> bool:
    return is_transformers(model) and bool(model.config.is_encoder_decoder)


def heads_of(model: nn.Module) -> set[nn.Module]:
    """The layers that make logits, whatever their names, by what transformers and timm say of a network."""
    own = getattr(model, "get_output_embeddings" if is_transformers(model) else "get_classifier", lambda: None)()
    heads = own if isinstance(own, tuple) else (own,)
    return {layer for head in heads if isinstance(head, nn.Module) for layer in head.modules()}


def noise(model: nn.Module, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A batch that says nothing, to be timed: images of noise, or tokens `[N, T]` that are all the first one."""
    if reads_tokens(model):
        return torch.zeros(shape, dtype=torch.int64, device=device)
    return torch.randn(shape, dtype=next(model.parameters()).dtype, device=device)


def copy_with(model: nn.Module, replaced: Mapping[Tensor, Tensor] | None = None) -> nn.Module:
    """A copy with other tensors in the place of some, and with the same tokenizer."""
    known = {id(original): other for original, other in (replaced or {}).items()}
    tokenizer = getattr(model, "tokenizer", None)
    return copy.deepcopy(model, known | {id(tokenizer): tokenizer})


def skeleton(model: nn.Module) -> nn.Module:
    """A copy on the meta device, for which no weight is copied."""
    weights = {parameter: nn.Parameter(parameter.detach().to("meta"), False) for parameter in model.parameters()}
    buffers = {buffer: buffer.to("meta") for buffer in model.buffers()}
    return copy_with(model, weights | buffers).to("meta")


def with_linear_layers(model: nn.Module, convolutions: Collection[str] = ()) -> nn.Module:
    """The network itself; or, where that needs changes, a copy that computes the same by calls of `nn.Linear`.

    GPT-2's `Conv1D` becomes one, its weight transposed; the `convolutions` of these names, all 1x1, each get one;
    PyTorch's own attention gets four; and timm's attention that reads the weight of its `qkv` (BEiT, EVA, SwinV2) calls
    it. But for the transposed ones, the copy shares its weights with the network.
    """
    library = sys.modules.get("transformers.pytorch_utils")  # who has such a layer has imported it
    transposed = [name for name, module in model.named_modules() if library and isinstance(module, library.Conv1D)]
    uncalled = [name for name, module in model.named_modules() if getattr(module, "qkv_bias_separate", None) is False]
    attention = {name: module for name, module in model.named_modules() if can_be_linear(module)}
    if not (transposed or uncalled or attention or convolutions):
        return model
    model = copy_with(model, {tensor: tensor for tensor in (*model.parameters(), *model.buffers())})
    for name in transposed:
        layer = model.get_submodule(name)
        replace(model, name, linear_layer(layer.weight.T.contiguous(), layer.bias))
    for name in uncalled:
        model.get_submodule(name).qkv_bias_separate = True  # type: ignore[assignment]
    for name, original in attention.items():
        replace(model, name, LinearAttention(original))
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # which only attention that calls no layers understands
    for name in convolutions:
        convolution = model.get_submodule(name)
        assert isinstance(convolution, nn.Conv2d)
        replace(model, name, PointwiseConvolution(convolution))
    return model


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of another, under every name that it has."""
    original = model.get_submodule(name)
    module.train(original.training)
    for place in [place for place, each in model.named_modules(remove_duplicate=False) if each is original]:
        model.set_submodule(place, module)


def _on_meta(inputs: Any) -> bool:
    return next(iter(tree_iter(inputs))).device.type == "meta"
