"""From factors to a decomposition whose leading part is the best approximation of every rank.

Legend: m = d_out, n = d_in, r = min(m, n).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from facts.decomposition.singular import product_singular_values, singular_values
from facts.estimators.base import KroneckerFactors
from facts.estimators.whitening import square_root
from facts.modules.lowrank import LinearLayer


@dataclass(frozen=True)
class Decomposition:
    """`left [m, r] @ right [r, n]` is the weight; components are sorted by their energy in the (A, B) metric.

    Both have the weight's type, float32 at least. `energies [r]` are the squared singular values of the whitened
    weight. `num_repaired` counts factors that were not positive definite. The bias keeps the output of the input
    `mean [n]` exact at every rank; None if it stays. With an `order [n]` the leading r components read its first r
    inputs alone. `left [h, m, r]` are those of h heads with one right factor.
    """

    left: Tensor
    right: Tensor
    energies: Tensor
    num_repaired: int = 0
    mean: Tensor | None = None
    order: Tensor | None = None

    def truncate(self, rank: int) -> tuple[Tensor, Tensor]:
        """`(W_A [m, rank], W_B [rank, n])`. Raises `ValueError` for a rank outside 1 .. r."""
        if not 1 <= rank <= len(self.energies):
            raise ValueError(f"rank must lie in 1 .. {len(self.energies)} for this layer, got {rank}")
        return self.left[..., :rank], self.right[:rank]

    def bias(self, dense: LinearLayer, rank: int) -> Tensor | None:
        """Bias of the layer that takes the dense one's place at a rank, `[m]`."""
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
    """Decompose `L_Bᵀ W L_A` by SVD and undo the roots; each factor gets the root of the singular values.

    With A = L_A L_Aᵀ and B = L_B L_Bᵀ this is the optimum of `tr(ΔWᵀ B ΔW A)` at every rank (paper, section 3.1).
    `weight [m, n]`; `shrinkage_row` acts on B, `shrinkage_col` on A. Float64 inside, the weight's type outside.
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
    """The same for a product `left [m, d] @ right [d, n]`, which is not formed: d components, by an SVD of `[d, d]`.

    Products with one right factor, `left [h, m, d]`, are decomposed together: B weighs the outputs of each.
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
    """The optimal `(W_A [m, rank], W_B [rank, n])` of one weight `[m, n]` (paper, Algorithm 1)."""
    decomposition = decompose(weight, factors, shrinkage_row=shrinkage_row, shrinkage_col=shrinkage_col)
    left, right = decomposition.truncate(rank)
    return left.to(weight.dtype), right.to(weight.dtype)
