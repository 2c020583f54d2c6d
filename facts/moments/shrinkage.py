"""Shrinkage towards a scaled identity."""

import torch
from torch import Tensor


def shrink(matrix: Tensor, amount: float) -> Tensor:
    """`(1 - amount) M + amount * mean(diag M) I` (paper, Algorithm 1, lines 7 and 8)."""
    target = matrix.diagonal().mean() * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    return torch.lerp(matrix, target, amount)
