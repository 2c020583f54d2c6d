"""From factors to a decomposition whose leading components are the best approximation at every rank.

Legend: m = d_out, n = d_in, r = min(m, n).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from facts.estimators.base import KroneckerFactors
from facts.estimators.whitening import square_root
from facts.modules.lowrank import LinearLayer
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


@dataclass(frozen=True)
class Decomposition:
    """`left [m, r] @ right [r, n]` is the weight; components are sorted by their energy in the (A, B) metric.

    Both have the weight's type, but at least float32. `energies [r]` are the squared singular values of the whitened
    weight. `num_repaired` counts factors that were not positive definite. The bias keeps the output at the input
    `mean [n]` exact at every rank; it is unchanged if that is None. With an `order [n]`, the leading k components read
    only its first k inputs. `left [h, m, r]` holds the left factors of h heads that share the right one.
    """

    left: Tensor
    right: Tensor
    energies: Tensor
    num_repaired: int = 0
    mean: Tensor | None = None
    order: Tensor | None = None

    def truncate(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return `(W_A [m, rank], W_B [rank, n])`. Raises `ValueError` for a rank outside 1 .. r."""
        if not 1 <= rank <= len(self.energies):
            raise ValueError(f"rank must be from 1 to {len(self.energies)} for this layer, got {rank}")
        return self.left[..., :rank], self.right[:rank]

    def bias(self, dense: LinearLayer, rank: int) -> Tensor | None:
        """Bias `[m]` of the layer that replaces the dense one at a rank."""
        if self.mean is None or dense.bias is None:
            return dense.bias
        weight = dense.weight.detach().double()
        left, right = (factor.to(weight) for factor in self.truncate(rank))
        mean = self.mean.to(left)
        lost = weight @ mean - left @ (right @ mean)
        return (dense.bias.detach() + lost).to(dense.bias)


def decompose(
    weight: Tensor, factors: KroneckerFactors, *, shrinkage_row: float = 0.0, shrinkage_col: float = 0.0
) -> Decomposition:
    """Decompose `L_Bᵀ W L_A` by SVD and undo the roots; each factor gets the square roots of the singular values.

    With A = L_A L_Aᵀ and B = L_B L_Bᵀ, truncation to any rank minimises `tr(ΔWᵀ B ΔW A)` (paper, section 3.1).
    `weight [m, n]`; `shrinkage_row` acts on B, `shrinkage_col` on A. Computed in float64.
    """
    row = square_root(factors.B, shrinkage_row, factors.repair)
    col = square_root(factors.A, shrinkage_col, factors.repair)
    u, s, vh = singular_values(col.right(row.left(weight.double())))
    left, right = row.undo_left(u * s.sqrt()), col.undo_right(s.sqrt()[:, None] * vh)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    num_repaired = row.repaired + col.repaired
    return Decomposition(left.to(dtype), right.to(dtype), s.square(), num_repaired, factors.mean)


def decompose_product(
    left: Tensor, right: Tensor, factors: KroneckerFactors, *, shrinkage_row: float = 0.0, shrinkage_col: float = 0.0
) -> Decomposition:
    """Decompose a product `left [m, d] @ right [d, n]` without forming it: d components, by an SVD of `[d, d]`.

    Products that share a right factor, `left [h, m, d]`, are decomposed together: B weights the outputs of each.
    """
    row = square_root(factors.B, shrinkage_row, factors.repair)
    col = square_root(factors.A, shrinkage_col, factors.repair)
    dtype, whitened = torch.promote_types(left.dtype, torch.float32), row.left(left.double())
    u, s, vh = product_singular_values(whitened.flatten(0, -2), col.right(right.double()))
    u = u.reshape(*left.shape[:-1], len(s))
    left, right = row.undo_left(u * s.sqrt()), col.undo_right(s.sqrt()[:, None] * vh)
    return Decomposition(left.to(dtype), right.to(dtype), s.square(), row.repaired + col.repaired, factors.mean)


def low_rank_factors(
    weight: Tensor, factors: KroneckerFactors, rank: int, shrinkage_row: float = 0.0, shrinkage_col: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute the optimal `(W_A [m, rank], W_B [rank, n])` of one weight `[m, n]` (paper, Algorithm 1)."""
    decomposition = decompose(weight, factors, shrinkage_row=shrinkage_row, shrinkage_col=shrinkage_col)
    left, right = decomposition.truncate(rank)
    return left.to(weight.dtype), right.to(weight.dtype)
