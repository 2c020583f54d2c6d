"""Networks rewritten as calls to linear layers: PyTorch's own attention, 1x1 convolutions and GPT-2's layers."""

import copy
import sys
from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_leaves

from facts.modules.lowrank import LowRankLayer, linear_layer, own_parameter

PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
COMPUTES_A_WEIGHT = (BasePruningMethod, SpectralNorm, WeightNorm)  # hooks before each call
HOOKS = [name for name in vars(nn.Module()) if name.startswith(("_forward", "_backward"))]


class LinearAttention(nn.Module):
    """`nn.MultiheadAttention` with its four products as calls to linear layers; arguments and results are the same."""

    in_proj_bias = None  # keeps PyTorch's encoder layers off their fused path, which calls no layers
    _qkv_same_embed_dim = True

    def __init__(self, original: nn.MultiheadAttention):
        super().__init__()
        self.num_heads, self.dropout, self.batch_first = original.num_heads, original.dropout, original.batch_first
        self.embed_dim = self.kdim = self.vdim = original.embed_dim
        self.head_dim = original.head_dim
        biases = (None,) * 3 if original.in_proj_bias is None else original.in_proj_bias.chunk(3)
        weights = original.in_proj_weight.chunk(3)
        self.query, self.key, self.value = (linear_layer(*parts) for parts in zip(weights, biases, strict=True))
        self.out_proj = linear_layer(original.out_proj.weight, original.out_proj.bias)

    @property
    def in_proj_weight(self) -> Tensor:
        """Weights of the three products, `[3 d, d]`, for code that reads them."""
        return torch.cat([self.query.weight, self.key.weight, self.value.weight])

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        batched = query.ndim == 3
        inputs: tuple[Tensor, ...] = (query, key, value)
        if not batched:
            inputs = tuple(tensor[None] for tensor in inputs)
        elif not self.batch_first:
            inputs = tuple(tensor.transpose(0, 1) for tensor in inputs)
        layers = (self.query, self.key, self.value)
        q, k, v = (
            layer(tensor).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, tensor in zip(layers, inputs, strict=True)
        )
        mask = self._mask(q, attn_mask, key_padding_mask)
        dropout, weights = self.dropout if self.training else 0.0, None
        if need_weights:
            scores = (q / q.shape[-1] ** 0.5) @ k.mT
            weights = F.dropout((scores if mask is None else scores + mask).softmax(dim=-1), dropout)
            mixed = weights @ v
            weights = weights.mean(dim=1) if average_attn_weights else weights
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        outputs = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if not batched:
            return outputs[0], None if weights is None else weights[0]
        return outputs if self.batch_first else outputs.transpose(0, 1), weights

    def _mask(self, q: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
        """Make the mask to add to the scores `[N, heads, T, S]`; boolean masks exclude where they are true."""
        masks = []
        if attn_mask is not None:  # [T, S], or [N * heads, T, S]
            mask = _added(attn_mask, q)
            masks.append(mask if mask.ndim == 2 else mask.unflatten(0, q.shape[:2]))
        if key_padding_mask is not None:  # [N, S], or [S]
            masks.append(_added(key_padding_mask, q).reshape(len(q), 1, 1, -1))
        return sum(masks[1:], masks[0]) if masks else None


def can_be_linear(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Check that `LinearAttention` can replace an attention module."""
    return (
        type(module) is nn.MultiheadAttention
        and module._qkv_same_embed_dim
        and module.bias_k is None
        and not module.add_zero_attn
    )


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)
    return mask.to(like.dtype)


class PointwiseConvolution(nn.Module):
    """A 1x1 convolution of images `[N, d_in, H, W]`, computed by a `linear` layer that shares its weights."""

    def __init__(self, convolution: nn.Conv2d):
        super().__init__()
        self.stride: Any = convolution.stride
        self.linear: nn.Linear | LowRankLayer = linear_layer(convolution.weight.flatten(1), convolution.bias)

    def forward(self, images: Tensor) -> Tensor:
        rows, columns = self.stride
        outputs = self.linear(images[..., ::rows, ::columns].movedim(-3, -1)).movedim(-1, -3)
        return outputs.contiguous() if images.is_contiguous() else outputs  # in a convolution's memory layout

    def convolution(self) -> nn.Conv2d:
        """Convert back to a convolution, with the layer's current weights."""
        layer = self.linear
        result = nn.Conv2d(layer.in_features, layer.out_features, 1, self.stride, bias=False, device="meta")
        result.weight = nn.Parameter(layer.weight.detach()[..., None, None], layer.weight.requires_grad)
        result.bias = layer.bias
        return result.train(self.training)


def is_pointwise(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Check for a convolution that only mixes channels: 1x1, not grouped, not padded."""
    return (
        type(module) is nn.Conv2d
        and module.kernel_size == (1, 1)
        and module.groups == 1
        and module.padding in ((0, 0), "valid", "same")
        and module.in_channels > 1
    )


def copy_with(model: nn.Module, replaced: Mapping[Any, Any] | None = None) -> nn.Module:
    """Copy a network with some tensors and modules replaced; the copy shares the tokenizer.

    Results of operations that a module keeps, such as its last outputs or a weight that a hook computes, are detached:
    they cannot be copied otherwise. Raises `ValueError` for other things that cannot, such as a lock.
    """
    held = (leaf for module in model.modules() for leaf in tree_leaves(vars(module)) if isinstance(leaf, Tensor))
    known: dict[int, Any] = {
        id(tensor): tensor.detach().clone() for tensor in held if not tensor.is_leaf or tensor.is_inference()
    }
    known |= {id(original): other for original, other in (replaced or {}).items()}
    tokenizer = getattr(model, "tokenizer", None)
    known[id(tokenizer)] = tokenizer
    try:
        return copy.deepcopy(model, known)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # from anyone's attributes
        first, *_ = str(error).splitlines() or [repr(error)]
        raise ValueError(
            f"{type(model).__name__} cannot be copied, as compression has to ({first}): give what cannot a "
            "__deepcopy__, or set it after compressing"
        ) from error


def stand_in(model: nn.Module) -> nn.Module:
    """Copy a network, to run the copy: it shares all parameters, and whatever a pass leaves in modules stays in it."""
    return copy_with(model, {parameter: parameter for parameter in model.parameters()})


def unwrapped(model: nn.Module) -> nn.Module:
    """Make a stand-in for a given network, with plain layers where something hides what they compute.

    `torch.compile` and DataParallel are taken off. The masks of `torch.nn.utils.prune`, and its old `weight_norm` and
    `spectral_norm`, become part of weights. Raises `ValueError` for a network that cannot be copied.
    """
    copies: dict[Any, Any] = {parameter: parameter for parameter in model.parameters()}
    for module in reversed(list(model.modules())):  # inner ones first, the network itself last
        inner = vars(module)["_modules"].get("_orig_mod", module.module if isinstance(module, PARALLEL) else module)
        if inner is not module or module is model:
            copies[module] = copy_with(inner, copies)
    for module in copies[model].modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, COMPUTES_A_WEIGHT):
                given = dict(module._parameters)
                masked = [name for name in given if name.endswith("_orig")]
                module._parameters.update({name: own_parameter(given[name]) for name in masked})
                hook.remove(module)  # which changes them in place
                del module._forward_pre_hooks[key]
                is_trained = any(given[name].requires_grad for name in given.keys() - module._parameters.keys())
                for name in module._parameters.keys() - given.keys():
                    module._parameters[name].requires_grad_(is_trained)
    for layer in copies[model].modules():
        if isinstance(layer, nn.Linear) and not is_parametrized(layer):
            layer.out_features, layer.in_features = layer.weight.shape  # another tool may have cut it
    return copies[model]


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
    """Replace a submodule by another module, under all its names; hooks that watch the one go to the other."""
    original = model.get_submodule(name)
    module.train(original.training)
    module._is_full_backward_hook = original._is_full_backward_hook
    for kind in HOOKS:
        vars(module)[kind].update(vars(original)[kind])
    for place in [place for place, each in model.named_modules(remove_duplicate=False) if each is original]:
        model.set_submodule(place, module)
