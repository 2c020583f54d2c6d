"""GFWSVD: nearest Kronecker product to the Fisher, by Lanczos (Chekalina et al., 2025).

A = nearest Kronecker product to the Fisher of 64-sample gradients
B = its other side
"""

from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor

from facts.estimators.base import KroneckerFactors, TwoSidedEstimator
from facts.estimators.whitening import raise_shrinkage
from facts.moments import GroupGradients, LayerMoments
from facts.moments.gradients import GradientStore


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class GFWSVD(TwoSidedEstimator):
    """The leading singular pair of V ↦ mean_k D_k V D_kᵀ, D_k the mean weight gradient of `group_size` samples.

    `store` is the place of the gradients: `disk` or `device`. A factor without a Cholesky factor is shrunk by 0.2, 0.3,
    ... until it has one (the rule of the original); by default there is no other shrinkage. `tolerance` is the relative
    accuracy of the singular value.
    """

    group_size: Annotated[int, Field(ge=1)] = 64
    store: Literal["disk", "device"] = "disk"
    tolerance: Annotated[float, Field(ge=0)] = 1e-9
    shrinkage_row: Annotated[float, Field(ge=0, le=1)] = 0.0
    shrinkage_col: Annotated[float, Field(ge=0, le=1)] = 0.0

    token_local = False
    couples = True

    @property
    def moments(self):
        return (GroupGradients(self.group_size, self.store),)

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        A, B = nearest_kronecker_product(moments[self.moments[0]], self.tolerance)
        return KroneckerFactors(A=A, B=B, repair=raise_shrinkage)


def nearest_kronecker_product(gradients: GradientStore, tolerance: float) -> tuple[Tensor, Tensor]:
    """`(A [n, n], B [m, m])` that minimise ‖mean_k vec(D_k) vec(D_k)ᵀ - A ⊗ B‖_F, in float64.

    Each iteration reads the gradients once. Both are symmetric, with positive traces and equal norms.
    """
    m, n = gradients.shape

    def apply(vector: np.ndarray, size: int, transpose: bool) -> np.ndarray:
        matrix = torch.from_numpy(vector.reshape(size, size)).to(gradients.like.device)
        total = torch.zeros((), dtype=matrix.dtype, device=matrix.device)
        for chunk in gradients.chunks():
            chunk = chunk.double().mT if transpose else chunk.double()
            total = total + (chunk @ matrix @ chunk.mT).sum(dim=0)
        return (total / gradients.num_gradients).flatten().cpu().numpy()

    operator = LinearOperator(
        shape=(m * m, n * n),
        matvec=lambda V: apply(V, n, transpose=False),
        rmatvec=lambda U: apply(U, m, transpose=True),
        dtype=np.float64,
    )
    u, s, vh = svds(operator, k=1, v0=np.eye(min(m, n)).ravel(), tol=tolerance)
    A, B = (_symmetric(vector * np.sqrt(s[0]), size) for vector, size in ((vh[0], n), (u[:, 0], m)))
    return A.to(gradients.like.device), B.to(gradients.like.device)


def _symmetric(vector: np.ndarray, size: int) -> Tensor:
    matrix = torch.from_numpy(vector.reshape(size, size))
    matrix = (matrix + matrix.T) / 2
    return matrix * torch.where(matrix.trace() < 0, -1.0, 1.0)
