"""Elimination of a layer's inputs: from Kronecker factors to an order of inputs, and weights for any number of them.

The others replace each eliminated input, as far as they predict it (structured optimal brain surgeon).
Legend: m = d_out, n = d_in; A [n, n] is the inputs' second moment, B [m, m] the metric of the outputs.
"""

import torch
from torch import Tensor

from facts.decomposition.truncation import Decomposition
from facts.estimators.base import KroneckerFactors
from facts.estimators.whitening import Root, lift_spectrum, square_root
from facts.utils.numerics import solved

STEPS_AT_ONCE = 64  # between updates of the full matrices


def eliminate(
    weight: Tensor, factors: KroneckerFactors, *, shrinkage_row: float = 0.0, shrinkage_col: float = 0.0
) -> Decomposition:
    """Order the inputs of `weight [m, n]` so that dropping any number of the last ones costs little.

    Inputs are eliminated one by one, each time the one whose loss adds least to tr(ΔWᵀ B ΔW A) after the others have
    compensated. The last to go come first in the `order`. With A = L D Lᵀ in this order, L unit lower triangular,
    component j is what input j adds to those before it: `left = W L`, `right = L⁻¹`. The leading k components read only
    the first k inputs, with their least-squares weights. Computed in float64; `left` undoes `right` as it is stored.
    """
    row = square_root(factors.B, shrinkage_row, factors.repair)
    gram, repaired = _definite(square_root(factors.A, shrinkage_col, factors.repair), weight)
    whitened = row.left(weight.double())
    order = torch.tensor(elimination_order(gram, whitened)[::-1], device=weight.device)
    root = solved(torch.linalg.cholesky, gram[order][:, order])
    sizes = root.diagonal()
    unit = root / sizes  # L
    dtype = torch.promote_types(weight.dtype, torch.float32)
    right = torch.zeros_like(gram)
    right[:, order] = torch.linalg.solve_triangular(
        unit, torch.eye(len(unit)).to(unit), upper=False, unitriangular=True
    )
    right = right.to(dtype)
    energies = (whitened[:, order] @ unit).square().sum(dim=0) * sizes.square()
    num_repaired = row.repaired + repaired
    return Decomposition(undone(weight, right, order), right, energies, num_repaired, factors.mean, order)


def undone(weight: Tensor, right: Tensor, order: Tensor) -> Tensor:
    """The left factor of `weight [m, n]` for a right factor `[n, n]` that is lower triangular in this order."""
    triangle, sorted_weight = right.double()[:, order], weight.double()[:, order]
    left = torch.linalg.solve_triangular(triangle, sorted_weight, upper=False, left=False, unitriangular=True)
    return left.to(right.dtype)


def elimination_order(gram: Tensor, whitened: Tensor) -> list[int]:
    """List the inputs in the order of their elimination, for A `[n, n]` and L_Bᵀ W `[m, n]`.

    Input j costs ‖w_j‖² / (A⁻¹)_jj. Eliminating it changes A⁻¹ and W by an outer product of two vectors; those of
    several steps are subtracted together from the remaining inputs.
    """
    inverse, weights = torch.cholesky_inverse(solved(torch.linalg.cholesky, gram)), whitened.clone()
    names, gone = torch.arange(len(gram), device=gram.device), []
    while len(names):
        squares, diagonal = weights.square().sum(dim=0), inverse.diagonal().clone()
        num_steps = min(STEPS_AT_ONCE, len(names))
        rows, columns = inverse.new_zeros(len(names), num_steps), weights.new_zeros(len(weights), num_steps)
        for step in range(num_steps):
            j = int((squares / diagonal).argmin())
            size = diagonal[j].sqrt()
            row = (inverse[:, j] - rows @ rows[j]) / size
            column = (weights[:, j] - columns @ rows[j]) / size
            overlap = weights.T @ column - rows @ (columns.T @ column)
            squares = (squares - 2 * row * overlap + row.square() * column.square().sum()).clamp(min=0)
            diagonal = (diagonal - row.square()).clamp(min=torch.finfo(diagonal.dtype).tiny)
            squares[j] = torch.inf
            rows[:, step], columns[:, step] = row, column
            gone.append(int(names[j]))
        kept = squares.isfinite()
        rows = rows[kept]
        inverse = inverse[kept][:, kept] - rows @ rows.T
        weights, names = weights[:, kept] - columns @ rows.T, names[kept]
    return gone


def _definite(root: Root, weight: Tensor) -> tuple[Tensor, bool]:
    """Return a root's matrix, made positive definite if directions were dropped, and whether it was repaired."""
    if root.matrix is None:
        return torch.eye(weight.shape[1], dtype=torch.float64, device=weight.device), root.repaired
    gram = root.matrix @ root.matrix.T
    return (gram if root.inverse is None else lift_spectrum(gram)), root.repaired
