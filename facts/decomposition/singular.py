"""Singular value decompositions of matrices, by the fastest method on each device, and of products."""

import torch
from torch import Tensor

from facts.utils.numerics import solved


def singular_values(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `u [m, r]`, descending `s [r]` and `vh [r, n]` of `matrix [m, n]` = `u s vh`, r = min(m, n); float64.

    A GPU uses the eigenvectors of the smaller Gram matrix, since LAPACK's algorithms take many times longer there.
    """
    return by_gram(matrix) if matrix.is_cuda else torch.linalg.svd(matrix, full_matrices=False)


def by_gram(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same by an eigendecomposition of the smaller of M Mᵀ and Mᵀ M.

    The eigenvectors are one side; the matrix times them is the other, with the singular values as lengths. So the
    product is exact up to rounding; below 1e-8 of the largest value, the other side's vectors need not be orthogonal.
    """
    rows, columns = matrix.shape
    if rows < columns:
        v, s, uh = by_gram(matrix.mT)
        return uh.mT, s, v.mT
    _, vectors = solved(torch.linalg.eigh, matrix.mT @ matrix)
    images = matrix @ vectors
    s, order = torch.linalg.vector_norm(images, dim=0).sort(descending=True)
    u = images[:, order] / s.clamp(min=torch.finfo(s.dtype).tiny)
    return u, s, vectors[:, order].mT


def product_singular_values(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `u [m, r]`, `s [r]` and `vh [r, n]` of the product `left [m, r] @ right [r, n]` without forming it."""
    (left, small), (right, other) = torch.linalg.qr(left), torch.linalg.qr(right.T)
    u, s, vh = solved(torch.linalg.svd, small @ other.T)
    return left @ u, s, vh @ right.T


def spectral_factors(left: Tensor, right: Tensor, *, share: float) -> tuple[Tensor, Tensor]:
    """Compute other factors of the product `left [m, r] @ right [r, n]` by its SVD.

    Columns of the first are singular vectors times their values to the power `share`; the second has the rest.
    """
    u, s, vh = product_singular_values(left, right)
    return u * s**share, (s ** (1 - share))[:, None] * vh
