"""Attention whose queries and keys may be of another width than its values."""

import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn


class NarrowAttention(nn.Module):
    """timm's attention `[N, T, d] -> [N, T, d]`, with its weights, in a form that can be narrowed in every direction.

    The scale is that of the original head: pruned dimensions of queries and keys count as zero.
    """

    def __init__(self, attention: Attention):
        super().__init__()
        self.num_heads, self.scale = attention.num_heads, attention.scale
        self.qkv, self.attn_drop = attention.qkv, attention.attn_drop
        self.proj, self.proj_drop = attention.proj, attention.proj_drop
        self.key_dim = self.value_dim = attention.head_dim

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        keys, values = self.num_heads * self.key_dim, self.num_heads * self.value_dim
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).split([keys, keys, values], dim=-1)
        )
        drop = self.attn_drop.p if self.training else 0.0
        x = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=drop, is_causal=is_causal, scale=self.scale
        )
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))
