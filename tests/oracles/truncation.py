"""The truncation error of section 3.1, with symmetric square roots instead of Cholesky factors."""

import torch
from torch import Tensor


def metric_error(difference: Tensor, A: Tensor | None, B: Tensor | None) -> Tensor:
    """tr(ΔWᵀ B ΔW A)."""
    m, n = difference.shape
    A = torch.eye(n, dtype=difference.dtype) if A is None else A
    B = torch.eye(m, dtype=difference.dtype) if B is None else B
    return (difference.T @ B @ difference @ A).trace()


def symmetric_root(matrix: Tensor | None) -> Tensor | None:
    if matrix is None:
        return None
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=0).sqrt()) @ vectors.T


def discarded_energies(weight: Tensor, A: Tensor | None, B: Tensor | None) -> Tensor:
    """For rank k, entry k - 1: the sum of the squared singular values of B^½ W A^½ beyond the first k."""
    whitened = weight
    if B is not None:
        whitened = symmetric_root(B) @ whitened
    if A is not None:
        whitened = whitened @ symmetric_root(A)
    energies = torch.linalg.svdvals(whitened).square()
    return energies.sum() - energies.cumsum(dim=0)
