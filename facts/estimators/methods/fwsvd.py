"""FW-SVD: squared gradients of each input feature (Hsu et al., 2022).

A = squared weight gradients, summed over outputs, on the diagonal
B = I
"""

from facts.estimators.base import Estimator, KroneckerFactors
from facts.moments import LayerMoments, SampleGradEnergy
from facts.utils.options import NotNegative, options


@options
class FWSVD(Estimator):
    """A = diag(f^exponent), B = I; up to a constant, f_j is the squared weight gradient averaged over outputs.

    Gradients are those of single samples. Their squares are averaged.
    """

    exponent: NotNegative = 1.0

    @property
    def moments(self):
        return (SampleGradEnergy(),)

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        (energy,) = moments[SampleGradEnergy()]
        return KroneckerFactors(A=((energy / moments.num_samples) ** self.exponent).diag())
