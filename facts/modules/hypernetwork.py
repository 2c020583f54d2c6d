"""A network that computes logits of masks, and masks of zeros and ones with a gradient."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN = 32  # as in the published implementations


class HyperNetwork(nn.Module):
    """Logits of several masks with these `widths`, computed from fixed random inputs by a bidirectional GRU."""

    def __init__(self, widths: Sequence[int]):
        super().__init__()
        self.register_buffer("inputs", torch.randn(len(widths), HIDDEN))
        self.gru = nn.GRU(HIDDEN, 2 * HIDDEN, bidirectional=True)
        self.norm = nn.LayerNorm(4 * HIDDEN)
        self.heads = nn.ModuleList(nn.Linear(4 * HIDDEN, width, bias=False) for width in widths)

    def forward(self) -> list[Tensor]:
        states = F.gelu(self.norm(self.gru(self.inputs)[0]))
        return [head(state) for head, state in zip(self.heads, states, strict=True)]


def seeded_hypernetwork(widths: Sequence[int], seed: int) -> HyperNetwork:
    """Make a hypernetwork from a seed, without changing PyTorch's own generator."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return HyperNetwork(widths)


def rounded(soft: Tensor) -> Tensor:
    """Round a mask between 0 and 1; its gradient is that of the unrounded mask (straight-through)."""
    return (soft > 0.5).to(soft) + soft - soft.detach()
