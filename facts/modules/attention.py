"""PyTorch's own attention, computed with calls to linear layers."""

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facts.modules.lowrank import linear_layer


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
