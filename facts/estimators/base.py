"""What an estimator is: which moments it asks for, and the Kronecker factors it makes of them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass as plain_dataclass
from typing import Annotated

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from facts.moments import LayerMoments, Moment
from facts.whitening import Repair, lift_spectrum

Fraction = Annotated[float, Field(ge=0, le=1)]


@plain_dataclass(frozen=True)
class KroneckerFactors:
    """Fisher ≈ A ⊗ B for the column-stacked weight: `A [d_in, d_in]`, `B [d_out, d_out]`, None for the identity.

    `repair` is what the method does with a factor that is not positive definite.
    """

    A: Tensor | None = None
    B: Tensor | None = None
    repair: Repair = lift_spectrum


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Estimator(ABC):
    """A method: pure, from the moments of one layer to its Kronecker factors before shrinkage."""

    @property
    @abstractmethod
    def moments(self) -> tuple[Moment, ...]:
        """What the data pass has to collect."""

    @abstractmethod
    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        """Kronecker factors of one layer, before shrinkage."""

    def shrinkage(self, moments: LayerMoments) -> tuple[float, float]:
        """Shrinkage of (B, A): row and column."""
        return 0.0, 0.0


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class TwoSidedEstimator(Estimator):
    """An estimator of both factors, shrunk by the paper's alpha_R (on B) and alpha_C (on A), Algorithm 1."""

    shrinkage_row: Fraction = 0.7
    shrinkage_col: Fraction = 0.1

    def shrinkage(self, moments: LayerMoments) -> tuple[float, float]:
        return self.shrinkage_row, self.shrinkage_col


def unit_trace(matrix: Tensor) -> Tensor:
    """The matrix divided by its trace; a zero matrix stays zero."""
    return matrix / matrix.trace().clamp(min=torch.finfo(matrix.dtype).tiny)
