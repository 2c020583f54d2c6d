"""From factors to a decomposition whose leading components are the best approximation at every rank.

Legend: m = d_out, n = d_in, r = min(m, n).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from facts.estimators.base import KroneckerFactors
from facts.estimators.whitening import Root, square_root
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
    """Compute the same of products `left [..., m, r] @ right [..., r, n]` without forming them."""
    (left, small), (right, other) = torch.linalg.qr(left), torch.linalg.qr(right.mT)
    u, s, vh = solved(torch.linalg.svd, small @ other.mT)
    return left @ u, s, vh @ right.mT


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
    return Decomposition(left.to(dtype), right.to(dtype), s.square(), int(row.repaired + col.repaired), factors.mean)


def decompose_products(problems: list[tuple[Tensor, Tensor, KroneckerFactors, float, float]]) -> list[Decomposition]:
    """Decompose products `left [m, d] @ right [d, n]` of one size without forming them, by SVDs of `[d, d]`.

    With each come its factors, and the shrinkage of B and of A. Products that share a right matrix, `left [h, m, d]`,
    are decomposed together: B weights the outputs of each.
    """
    lefts, rights, factors, *amounts = zip(*problems, strict=True)
    row, col, num_repaired = roots(factors, *amounts)
    by_row = torch.stack(lefts).detach().double().movedim(-2, 1)  # [b, m, h, d]
    whitened = row.left(by_row.flatten(2)).reshape(by_row.shape).movedim(1, -2).flatten(1, -2)  # [b, h m, d]
    u, s, vh = product_singular_values(whitened, col.right(torch.stack(rights).detach().double()))
    by_row = (u * s.sqrt()[:, None]).unflatten(1, lefts[0].shape[:-1]).movedim(-2, 1)
    left, right = row.undo_left(by_row.flatten(2)).reshape(by_row.shape), col.undo_right(s.sqrt()[..., None] * vh)
    means, dtype = [each.mean for each in factors], torch.promote_types(lefts[0].dtype, torch.float32)
    return list(map(Decomposition, left.movedim(1, -2).to(dtype), right.to(dtype), s.square(), num_repaired, means))


def roots(factors: Sequence[KroneckerFactors], *shrinkage: Sequence[float]) -> tuple[Root, Root, list[int]]:
    """Compute the roots of B and A of layers of one size, and how many of each layer were repaired.

    Raises `ValueError` if only some layers have a side, or their repairs differ.
    """
    if len({(each.A is None, each.B is None, each.repair) for each in factors}) > 1:
        raise ValueError("factors that differ in their sides or repair have no common root")
    sides = ([each for each in side if each is not None] for side in zip(*((f.B, f.A) for f in factors), strict=True))
    row, col = (
        square_root(torch.stack(side) if side else None, amounts, factors[0].repair)
        for side, amounts in zip(sides, shrinkage, strict=True)
    )
    repaired = row.repaired + col.repaired
    return row, col, repaired.tolist() if isinstance(repaired, Tensor) else [0] * len(factors)


def low_rank_factors(
    weight: Tensor, factors: KroneckerFactors, rank: int, shrinkage_row: float = 0.0, shrinkage_col: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute the optimal `(W_A [m, rank], W_B [rank, n])` of one weight `[m, n]` (paper, Algorithm 1)."""
    left, right = decompose(weight, factors, shrinkage_row=shrinkage_row, shrinkage_col=shrinkage_col).truncate(rank)
    return left.to(weight.dtype), right.to(weight.dtype)
