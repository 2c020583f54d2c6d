"""The empirical Fisher as a matrix, from per-sample gradients; columns of the weight are stacked.

And the truncation error of section 3.1, with symmetric square roots instead of Cholesky factors.
"""

import torch
from torch import Tensor

from tests.oracles.samples import Sample


def dense_fisher(samples: list[Sample]) -> Tensor:
    """E[vec(D) vec(D)ᵀ] `[m n, m n]`."""
    return sum(torch.outer(s.D.T.flatten(), s.D.T.flatten()) for s in samples) / len(samples)


def dense_token_local(samples: list[Sample]) -> Tensor:
    """E[Σ_t (x_t x_tᵀ) ⊗ (g_t g_tᵀ)] `[m n, m n]`."""
    pairs = [(x, g) for s in samples for x, g in zip(s.X, s.G, strict=True)]
    return sum(torch.kron(torch.outer(x, x), torch.outer(g, g)) for x, g in pairs) / len(samples)


def dense_product(A: Tensor | None, B: Tensor | None, d_in: int, d_out: int) -> Tensor:
    """A ⊗ B, None being the identity."""
    A = torch.eye(d_in, dtype=torch.float64) if A is None else A
    B = torch.eye(d_out, dtype=torch.float64) if B is None else B
    return torch.kron(A, B)


def matrix_cosine(F: Tensor, G: Tensor) -> float:
    return ((F * G).sum() / F.norm() / G.norm()).item()


def rearranged(fisher: Tensor, d_in: int, d_out: int) -> Tensor:
    """One row a block (i, j) of the Fisher `[n², m²]`, so that A ⊗ B becomes vec(A) vec(B)ᵀ (Van Loan, Pitsianis)."""
    blocks = fisher.view(d_in, d_out, d_in, d_out)
    return blocks.permute(0, 2, 1, 3).reshape(d_in**2, d_out**2)


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
