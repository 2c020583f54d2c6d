"""FW-SVD: squared gradients of each input feature (Hsu et al., 2022).

A = squared weight gradients, summed over outputs, on the diagonal
B = I
"""

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from facts.estimators.base import Estimator, KroneckerFactors
from facts.moments import LayerMoments, SampleGradEnergy


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class FWSVD(Estimator):
    """A = diag(f^exponent) with f_j the mean over samples and outputs of the squared weight gradient; B = I."""

    exponent: Annotated[float, Field(ge=0)] = 1.0

    @property
    def moments(self):
        return (SampleGradEnergy(),)

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        (energy,) = moments[SampleGradEnergy()]
        return KroneckerFactors(A=((energy / moments.num_samples) ** self.exponent).diag())
