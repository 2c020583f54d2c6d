"""Singular value decompositions of matrices, by the way that is fast on each device, and of products."""

import torch
from torch import Tensor


def singular_values(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`u [m, r]`, `s [r]` falling, `vh [r, n]` with `u s vh = matrix [m, n]`, r = min(m, n); float64.

    On a GPU by the eigenvectors of the smaller Gram matrix, since LAPACK's algorithms run there many times as long.
    """
    return by_gram(matrix) if matrix.is_cuda else torch.linalg.svd(matrix, full_matrices=False)


def by_gram(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same by an eigendecomposition of the smaller of M Mᵀ and Mᵀ M.

    The eigenvectors are one side; the matrix times these is the other, with the singular values as lengths. So the
    product is exact to rounding; below 1e-8 of the largest value, the other side's vectors need not be orthogonal.
    """
    rows, columns = matrix.shape
    if rows < columns:
        v, s, uh = by_gram(matrix.mT)
        return uh.mT, s, v.mT
    vectors = torch.linalg.eigh(matrix.mT @ matrix).eigenvectors
    images = matrix @ vectors
    s, order = torch.linalg.vector_norm(images, dim=0).sort(descending=True)
    u = images[:, order] / s.clamp(min=torch.finfo(s.dtype).tiny)
    return u, s, vectors[:, order].mT


def product_singular_values(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`u [m, r]`, `s [r]` and `vh [r, n]` of the product `left [m, r] @ right [r, n]`, which is not formed."""
    (left, small), (right, other) = torch.linalg.qr(left), torch.linalg.qr(right.T)
    u, s, vh = torch.linalg.svd(small @ other.T)
    return left @ u, s, vh @ right.T


def spectral_factors(left: Tensor, right: Tensor, *, share: float) -> tuple[Tensor, Tensor]:
    """Factors of the same product `left [m, r] @ right [r, n]`, by its SVD.

    Columns of the first are singular vectors times their values to the power `share`; the second has the rest.
    """
    u, s, vh = product_singular_values(left, right)
    return u * s**share, (s ** (1 - share))[:, None] * vh
