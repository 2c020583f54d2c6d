"""GFWSVD: nearest Kronecker product to the Fisher, by power iteration (Chekalina et al., 2025).

A = input side of the nearest Kronecker product to the Fisher of 64-sample gradients
B = its output side
"""

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from facts.estimators.base import KroneckerFactors, TwoSidedEstimator
from facts.estimators.whitening import raise_shrinkage
from facts.moments import GroupGradients, LayerMoments
from facts.moments.statistics import at_least_tiny
from facts.utils.options import Count, NotNegative, Share, options

log = logging.getLogger(__name__)

MAX_STEPS = 1000
CHUNK_BYTES = 2**28  # of gradients that are laid out at a time


@options
class GFWSVD(TwoSidedEstimator):
    """The leading singular pair of V ↦ mean_k D_k V D_kᵀ, D_k the mean weight gradient of `group_size` samples.

    A factor that is not positive definite is shrunk by 0.2, 0.3, ... until it is (as in the original). The iteration
    ends when a step changes the direction of A by no more than `tolerance`.
    """

    group_size: Count = 64
    tolerance: NotNegative = 1e-8
    shrinkage_row: Share = 0.0
    shrinkage_col: Share = 0.0

    token_local = False
    couples = True

    @property
    def moments(self):
        return (GroupGradients(self.group_size),)

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        A, B = nearest_kronecker_product(moments[self.moments[0]][0], self.tolerance)
        return KroneckerFactors(A=A, B=B, repair=raise_shrinkage)


def nearest_kronecker_product(gradients: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Find `(A [n, n], B [m, m])` that minimise ‖mean_k vec(D_k) vec(D_k)ᵀ - A ⊗ B‖_F, in float64, for D `[K, m, n]`.

    Power iteration from the identity: B ← mean_k D_k A D_kᵀ, A ← mean_k D_kᵀ B D_k. Both have equal norms.
    """
    m, n = gradients.shape[1:]
    chunks = gradients.split(max(1, CHUNK_BYTES // (m * n * gradients.element_size())))

    def side_by_side(transposed: bool) -> Iterator[Tensor]:
        """Lay out each chunk's gradients as one matrix `[m, k n]`, or their transposes as `[n, k m]`."""
        for chunk in chunks:
            yield (chunk.mT if transposed else chunk).double().transpose(0, 1).flatten(1).contiguous()

    kept = {each: list(side_by_side(each)) for each in (False, True)} if len(chunks) == 1 else {}

    def mean(matrix: Tensor, transposed: bool) -> Tensor:
        """The mean of D_k M D_kᵀ, or of D_kᵀ M D_k."""
        laid_out = kept.get(transposed) or side_by_side(transposed)
        products = ((D.view(-1, len(matrix)) @ matrix).view(D.shape) @ D.T for D in laid_out)
        return sum(products, matrix.new_zeros(())) / len(gradients)

    A = torch.eye(n, dtype=torch.float64, device=gradients.device) / n**0.5
    for _ in range(MAX_STEPS):
        B = _unit(mean(A, transposed=False))
        next_A = mean(B, transposed=True)
        value, previous, A = torch.linalg.matrix_norm(next_A), A, _unit(next_A)
        if torch.linalg.matrix_norm(A - previous) <= tolerance:
            break
    else:
        log.warning("GFWSVD on a layer of %d x %d: %d steps did not reach tolerance %g", m, n, MAX_STEPS, tolerance)
    return A * value.sqrt(), B * value.sqrt()


def _unit(matrix: Tensor) -> Tensor:
    """Make a matrix symmetric, with Frobenius norm 1; a zero matrix stays zero."""
    matrix = (matrix + matrix.T) / 2
    return matrix / at_least_tiny(torch.linalg.matrix_norm(matrix))
