"""The empirical Fisher as a matrix, from per-sample gradients; columns of the weight are stacked."""

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
