"""ASVD: magnitude of each input feature (Yuan et al., 2024).

A = magnitude of each feature of x, on the diagonal
B = I
"""

from typing import Literal

from facts.estimators.base import Estimator, KroneckerFactors
from facts.moments import InputMagnitude, LayerMoments
from facts.utils.options import NotNegative, options


@options
class ASVD(Estimator):
    """A = diag(scale²) with scale = s^alpha + 1e-6, s the sum over batches of mean or max |x|; B = I."""

    statistic: Literal["mean", "max"] = "mean"
    alpha: NotNegative = 0.5

    @property
    def moments(self):
        return (InputMagnitude(self.statistic),)

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        (magnitude,) = moments[InputMagnitude(self.statistic)]
        return KroneckerFactors(A=(magnitude**self.alpha + 1e-6).square().diag())
