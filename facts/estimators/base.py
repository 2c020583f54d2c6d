"""Estimators: from moments to the Kronecker factors of the Fisher."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from facts.estimators.whitening import Repair, lift_spectrum
from facts.moments import InputGram, LayerMoments, Moment
from facts.moments.statistics import Normalize, at_least_tiny
from facts.utils.options import Positive, Share, options

# From the paper, and chosen on photos (results/photos/earlier/unit_defaults.csv).
ROW_OF_LAYERS, ROW_OF_UNITS = 0.7, 0.3
PLAIN_SHARE_OF_UNITS = 0.5
TAKE_TWO_SIDED = "take an estimator of both sides (facts, kfac_expand, kfac_reduce, shampoo2, gfwsvd)"


@dataclass(frozen=True)
class KroneckerFactors:
    """Fisher ≈ A ⊗ B for the column-stacked weight: `A [d_in, d_in]`, `B [d_out, d_out]`, None for the identity.

    `repair` makes a factor positive definite if it is not; None drops the directions that make it singular instead.
    With a `mean [d_in]`, A is of inputs minus this mean, and the bias keeps the output at the mean input exact.
    """

    A: Tensor | None = None
    B: Tensor | None = None
    repair: Repair | None = lift_spectrum
    mean: Tensor | None = None


@options
class Estimator(ABC):
    """A method: a pure function from the moments of one layer to its Kronecker factors before shrinkage.

    `token_local`: no moment combines two tokens of a sample. `couples`: the factors depend on which gradient belongs to
    which activation. None if this does not apply (paper, table of estimators).
    """

    token_local: ClassVar[bool | None] = None
    couples: ClassVar[bool | None] = None

    @property
    @abstractmethod
    def moments(self) -> tuple[Moment, ...]:
        """Moments that the data pass must collect."""

    @abstractmethod
    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        """Compute the Kronecker factors of one layer, before shrinkage."""

    def shrinkage(self, moments: LayerMoments) -> tuple[float, float]:
        """Amounts of shrinkage for (B, A): row, then column."""
        return 0.0, 0.0

    @property
    def num_passes(self) -> int:
        """Number of passes over the data."""
        return 1

    def refined(self, factors: Mapping[str, KroneckerFactors]) -> "Estimator":
        """Make the estimator for the next pass from every layer's factors in this one."""
        raise NotImplementedError(f"{type(self).__name__} makes only one data pass")


def see_data(
    estimator: Estimator, collect: Callable[[tuple[Moment, ...]], dict[str, LayerMoments]]
) -> tuple[Estimator, dict[str, LayerMoments]]:
    """Run every pass of an estimator, with one call of `collect` each; return the last estimator and its moments."""
    moments = collect(estimator.moments)
    for _ in range(estimator.num_passes - 1):
        estimator = estimator.refined({name: estimator.factors(layer) for name, layer in moments.items()})
        moments = collect(estimator.moments)
    return estimator, moments


@options
class TwoSidedEstimator(Estimator):
    """An estimator of both factors, shrunk by the paper's alpha_R (on B) and alpha_C (on A), Algorithm 1."""

    shrinkage_row: Share = ROW_OF_LAYERS
    shrinkage_col: Share = 0.1

    def shrinkage(self, moments: LayerMoments) -> tuple[float, float]:
        return self.shrinkage_row, self.shrinkage_col


@options
class ClippedGradEstimator(TwoSidedEstimator):
    """A two-sided estimator of clipped gradients (paper, Algorithm 2 and the supplement on the setup).

    `grad_clip` bounds the Frobenius norm of each sample's output gradient; `median` uses the median of its batch.
    Clipping keeps the scale of the factors, so that searches can compare layers by it. `tokens` instead limits the norm
    of each token's gradient to 0.1 to 10 times the mean norm in its sample.
    """

    grad_clip: Positive | Literal["median", "tokens"] | None = "median"


@options
class WeightedInputEstimator(ClippedGradEstimator):
    """A two-sided estimator whose A weights inputs by gradients, so that a few samples can dominate it.

    With `normalize: batch` each batch contributes equally to A. The inputs' plain second moment has `plain_share` of
    A's trace (None: half for units, none for layers). `shrinkage_row` None: 0.3 for units, 0.7 for layers.
    """

    shrinkage_row: Share | None = None  # type: ignore[assignment]
    normalize: Normalize = "batch"
    plain_share: Share | None = None

    @property
    def plain_moments(self) -> tuple[Moment, ...]:
        return (InputGram(),) if self.plain_share else ()

    def with_plain(self, A: Tensor, moments: LayerMoments) -> Tensor:
        """Mix the plain share into A, keeping its trace."""
        if not self.plain_share:
            return A
        (plain,) = moments[InputGram()]
        return torch.lerp(A, unit_trace(plain).to(A) * A.trace(), self.plain_share)

    def shrinkage(self, moments: LayerMoments) -> tuple[float, float]:
        return ROW_OF_LAYERS if self.shrinkage_row is None else self.shrinkage_row, self.shrinkage_col

    def for_units(self) -> Self:
        """Copy the estimator, with its defaults for units filled in."""
        row = ROW_OF_UNITS if self.shrinkage_row is None else self.shrinkage_row
        share = PLAIN_SHARE_OF_UNITS if self.plain_share is None else self.plain_share
        return replace(self, shrinkage_row=row, plain_share=share)


def unit_trace(matrix: Tensor) -> Tensor:
    """Divide a matrix by its trace; a zero matrix stays zero."""
    return matrix / at_least_tiny(matrix.trace())
