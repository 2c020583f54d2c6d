"""Elimination of a layer's inputs: from Kronecker factors to an order of inputs, and weights for any number of them.

The others replace each eliminated input, as far as they predict it (structured optimal brain surgeon).
Legend: m = d_out, n = d_in; A [n, n] is the inputs' second moment, B [m, m] the metric of the outputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from facts.decomposition.truncation import Decomposition, roots
from facts.estimators.base import KroneckerFactors
from facts.estimators.whitening import lift_spectrum
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
    (decomposition,) = eliminate_together([(weight, factors, shrinkage_row, shrinkage_col)])
    return decomposition


def eliminate_together(problems: Sequence[tuple[Tensor, KroneckerFactors, float, float]]) -> list[Decomposition]:
    """Do the same for several layers of one size, which take each step together: weight, factors, shrinkage of B, A."""
    weights, factors, *amounts = zip(*problems, strict=True)
    row, col, num_repaired = roots(factors, *amounts)
    whitened = row.left(torch.stack(weights).double())
    grams = torch.eye(whitened.shape[-1]).to(whitened).expand(len(weights), -1, -1)
    if col.matrix is not None:
        grams = col.matrix @ col.matrix.mT
    if col.inverse is not None:  # directions were dropped
        grams = torch.stack([lift_spectrum(gram) for gram in grams])
    orders, means = elimination_orders(grams, whitened), [each.mean for each in factors]
    return list(map(_in_order, weights, orders, means, grams, whitened, num_repaired))


def _in_order(
    weight: Tensor, order: Tensor, mean: Tensor | None, gram: Tensor, whitened: Tensor, num_repaired: int
) -> Decomposition:
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
    return Decomposition(undone(weight, right, order), right, energies, num_repaired, mean, order)


def undone(weight: Tensor, right: Tensor, order: Tensor) -> Tensor:
    """The left factor of `weight [m, n]` for a right factor `[n, n]` that is lower triangular in this order."""
    triangle, sorted_weight = right.double()[:, order], weight.double()[:, order]
    left = torch.linalg.solve_triangular(triangle, sorted_weight, upper=False, left=False, unitriangular=True)
    return left.to(right.dtype)


def elimination_orders(grams: Tensor, whitened: Tensor) -> Tensor:
    """Inputs `[b, n]` of b layers from the last to the first eliminated, for each A `[n, n]` and L_Bᵀ W `[m, n]`.

    With P = A⁻¹ and S = Wᵀ B W, input j costs S_jj / P_jj. Eliminating it subtracts r rᵀ from P, r oᵀ + o rᵀ from S,
    where r = P_j / √P_jj and o = S_j / √P_jj - r S_jj / (2 P_jj). Those of several steps are subtracted together from
    the remaining inputs. All layers take each step together, and no step waits for the device.
    """
    roots = solved(torch.linalg.cholesky, grams)
    tables = torch.stack([torch.cholesky_inverse(roots), whitened.mT @ whitened], dim=1)  # P and S
    layers = torch.arange(len(grams), device=grams.device)
    names, gone = torch.arange(grams.shape[-1], device=grams.device).expand(len(grams), -1), []
    while size := names.shape[1]:
        num_steps, steps = min(STEPS_AT_ONCE, size), []
        diagonal, squares = tables.diagonal(dim1=-2, dim2=-1).clone().unbind(1)
        changes = tables.new_zeros(len(grams), 2, num_steps, size)  # r and o of each step
        for step in range(num_steps):
            least, j = (squares / diagonal).min(dim=1, keepdim=True)
            rows, others = changes[:, :, :step].unbind(1)
            at_j = changes[layers, :, :step, j[:, 0]]
            change = torch.baddbmm(tables[layers, :, j[:, 0]], at_j, rows, alpha=-1)
            change[:, 1:].baddbmm_(at_j[:, :1], others, alpha=-1)
            row, other = change.div_(diagonal.gather(1, j)[..., None].sqrt()).unbind(1)
            other.addcmul_(row, least, value=-0.5)
            squares = squares.addcmul(row, other, value=-2).clamp_(min=0).scatter_(1, j, torch.inf)
            diagonal = diagonal.addcmul(row, row, value=-1).clamp_(min=torch.finfo(diagonal.dtype).tiny)
            changes[:, :, step] = change
            steps.append(j)
        gone.append(names.gather(1, torch.cat(steps, dim=1)))
        kept = squares.isinf().to(torch.uint8).argsort(dim=1, stable=True)[:, : size - num_steps]
        names = names.gather(1, kept)
        tables = torch.stack([table[:, own][..., own] for table, own in zip(tables, kept, strict=True)])
        rows, others = torch.stack([each[..., own] for each, own in zip(changes, kept, strict=True)]).unbind(1)
        tables[:, 0].baddbmm_(rows.mT, rows, alpha=-1)
        tables[:, 1].baddbmm_(rows.mT, others, alpha=-1).baddbmm_(others.mT, rows, alpha=-1)
    return torch.cat(gone, dim=1).flip(1)
