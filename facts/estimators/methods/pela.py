"""PELA: plain SVD of the weights; needs no data (Guo et al., 2024).

A = I
B = I
"""

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from facts.estimators.base import Estimator, KroneckerFactors
from facts.moments import LayerMoments


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class PELA(Estimator):
    """A = B = I, and no data."""

    @property
    def moments(self):
        return ()

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        return KroneckerFactors()
