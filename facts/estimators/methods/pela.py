"""PELA: plain SVD of the weights; needs no data (Guo et al., 2024).

A = I
B = I
"""

from facts.estimators.base import Estimator, KroneckerFactors
from facts.moments import LayerMoments
from facts.utils.options import options


@options
class PELA(Estimator):
    """A = B = I; uses no data."""

    @property
    def moments(self):
        return ()

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        return KroneckerFactors()
