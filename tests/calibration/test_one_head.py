"""Attention is narrowed only if its code follows the width of its heads."""

import torch
import torch.nn.functional as F
from torch import nn

import facts
from facts.parts.attention import OutputUnit, ScoreUnit
from facts.parts.layers import LayerPart


class Attention(nn.Module):
    """One head, as wide as the inputs; its code takes the width from the projection's outputs, or from the inputs."""

    def __init__(self, size: int, follows: bool):
        super().__init__()
        self.num_heads, self.follows = 1, follows
        self.qkv, self.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x):
        projected = self.qkv(x)
        assert self.follows or projected.shape[-1] == 3 * x.shape[-1]  # as anyone's code may check
        width = projected.shape[-1] // 3 if self.follows else x.shape[-1]
        queries, keys, values = projected.unflatten(-1, (3, width)).unbind(-2)
        return self.proj(F.scaled_dot_product_attention(queries, keys, values))


class Network(nn.Module):
    def __init__(self, follows: bool):
        super().__init__()
        self.attention = Attention(12, follows)

    def forward(self, x):
        return self.attention(x).mean(dim=1)


def test_one_head_is_a_unit_only_if_the_code_follows_its_width():
    """At the width of the inputs both codes run; narrower, one does not."""
    torch.manual_seed(0)
    batches = [(torch.randn(8, 5, 12), torch.randint(12, (8,))) for _ in range(2)]
    follows, fixed = (
        facts.prepare(Network(each).eval(), batches, held_out=(), parts="units") for each in (True, False)
    )
    assert [type(part) for part in follows.parts.values()] == [ScoreUnit, OutputUnit]
    assert [type(part) for part in fixed.parts.values()] == [LayerPart, LayerPart]
    assert set(fixed.skipped) >= {"attention.qkv", "attention.proj"} and not follows.skipped
    assert facts.compress(follows, estimator="pela", search="uniform", ratio=0.5).model(batches[0][0]).shape == (8, 12)
