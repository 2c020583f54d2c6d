"""A network that makes the logits of masks, and masks of zeros and ones with a gradient."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN = 32  # as in the published codes


class HyperNetwork(nn.Module):
    """Logits of each of several masks, from fixed random inputs through a bidirectional GRU; widths are the masks'."""

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
    """A hypernetwork by a seed, which leaves PyTorch's own generator alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return HyperNetwork(widths)


def rounded(soft: Tensor) -> Tensor:
    """Round a mask between 0 and 1; gradients pass as through the mask itself (straight through)."""
    return (soft > 0.5).to(soft) + soft - soft.detach()
