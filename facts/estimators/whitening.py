"""Square roots of Kronecker factors: shrinkage, and repair of factors that are not positive definite.

Everything is in float64: these roots decide which directions a rank keeps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from facts.utils.numerics import solved

# Fisher and Gram matrices are sums in float32: an eigenvalue below its precision is rounding error.
NEAR_SINGULAR = torch.finfo(torch.float32).eps

Repair = Callable[[Tensor], Tensor]
"""Turns a symmetric matrix that is not positive definite into one that is."""


@dataclass(frozen=True)
class Root:
    """A matrix M `[..., d, d]` such that M Mᵀ is one factor, or None for the identity.

    M is the lower Cholesky factor, unless its pseudo-`inverse` is given. `repaired` is 1 if a fallback was needed.
    """

    matrix: Tensor | None
    repaired: Tensor | int = 0
    inverse: Tensor | None = None

    def left(self, factor: Tensor) -> Tensor:
        """Mᵀ times a factor `[d, k]`."""
        return factor if self.matrix is None else self.matrix.mT @ factor

    def right(self, factor: Tensor) -> Tensor:
        """A factor `[k, d]` times M."""
        return factor if self.matrix is None else factor @ self.matrix

    def undo_left(self, factor: Tensor) -> Tensor:
        """M⁻ᵀ times a factor `[d, k]`."""
        if self.matrix is None:
            return factor
        if self.inverse is not None:
            return self.inverse.mT @ factor
        return torch.linalg.solve_triangular(self.matrix.mT, factor, upper=True)

    def undo_right(self, factor: Tensor) -> Tensor:
        """A factor `[k, d]` times M⁻¹."""
        if self.matrix is None:
            return factor
        if self.inverse is not None:
            return factor @ self.inverse
        return torch.linalg.solve_triangular(self.matrix, factor, upper=False, left=False)


def shrink(matrix: Tensor, amount: float | Sequence[float]) -> Tensor:
    """`(1 - amount) M + amount * mean(diag M) I` (paper, Algorithm 1, lines 7 and 8); M may be `[b, d, d]`."""
    amounts = torch.as_tensor(amount, dtype=matrix.dtype, device=matrix.device)[..., None, None]
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None]
    return torch.lerp(matrix, mean * _identity(matrix), amounts)


def is_definite(matrix: Tensor) -> Tensor:
    """Check whether every eigenvalue exceeds 2⁻²³ of the Frobenius norm; otherwise, the matrix counts as singular."""
    floor = NEAR_SINGULAR * torch.linalg.matrix_norm(matrix)[..., None, None]
    return torch.linalg.cholesky_ex(matrix - floor * _identity(matrix)).info == 0


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def lift_spectrum(matrix: Tensor) -> Tensor:
    """Add to the diagonal until the smallest eigenvalue is a millionth of the mean eigenvalue."""
    return _lift(matrix, 1e-6 * matrix.diagonal().mean())


def lift_spectrum_to_1e_6(matrix: Tensor) -> Tensor:
    """Add `(1e-6 - λ_min) I`, whatever the scale of the matrix: SVD-LLM's rule."""
    return _lift(matrix, 1e-6)


def raise_shrinkage(matrix: Tensor) -> Tensor:
    """Shrink by the smallest of 0.2, 0.3, ..., 1.0 that makes the matrix positive definite: GFWSVD's rule."""
    for tenths in range(2, 11):
        shrunk = shrink(matrix, tenths / 10)
        if is_definite(shrunk):
            break
    return shrunk


def _lift(matrix: Tensor, floor: Tensor | float) -> Tensor:
    # On the CPU: with a GPU's eigenvalue, lifted singular matrices were seen not to be positive definite.
    smallest = torch.linalg.eigvalsh(matrix.cpu())[0].to(matrix.device)
    # The eigenvalue itself carries a rounding error of this size, which must not push the result back below zero.
    rounding = len(matrix) * torch.finfo(matrix.dtype).eps * matrix.diagonal().abs().max()
    lift = torch.clamp(floor - smallest + rounding, min=0)
    return matrix + lift * _identity(matrix)


def square_root(factor: Tensor | None, shrinkage: float | Sequence[float], repair: Repair | None) -> Root:
    """Compute the root of the shrunk factor `[..., d, d]`, in float64.

    A factor that is not positive definite is repaired, or, without a `repair`, loses the directions that make it
    singular; a factor without energy (`trace <= 0`) becomes the identity. Both are marked as `repaired`. Raises
    `ValueError` if the factor holds NaN or infinity.
    """
    if factor is None:
        return Root(None)
    matrix = factor.double()
    if not torch.isfinite(matrix).all():
        raise ValueError("the factor holds NaN or infinity")
    empty = matrix.diagonal(dim1=-2, dim2=-1).sum(dim=-1) <= 0
    matrix = torch.where(empty[..., None, None], _identity(matrix), shrink((matrix + matrix.mT) / 2, shrinkage))
    if repair is None:
        return _spectral_root(matrix, empty)
    definite = is_definite(matrix)
    if not definite.all():
        each = zip(matrix.view(-1, *matrix.shape[-2:]), definite.view(-1), strict=True)
        matrix = torch.stack([one if is_fine else repair(one) for one, is_fine in each]).view_as(matrix)
    return Root(solved(torch.linalg.cholesky, matrix), (empty | ~definite).int())


def _spectral_root(matrix: Tensor, empty: Tensor) -> Root:
    """U √S of the eigenvalues above the floor of `is_definite`; the columns of the others are zero."""
    values, vectors = solved(torch.linalg.eigh, matrix)
    kept = values > NEAR_SINGULAR * torch.linalg.matrix_norm(matrix)[..., None]
    sizes = torch.where(kept, values, 1).sqrt()
    inverse = torch.where(kept, 1 / sizes, 0)[..., None] * vectors.mT
    return Root(vectors * torch.where(kept, sizes, 0)[..., None, :], (empty | ~kept.all(dim=-1)).int(), inverse)
