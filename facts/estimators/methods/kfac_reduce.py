"""KFAC-reduce: K-FAC on sums over tokens (paper, eq. kfac_reduce).

A = (Σ x)(Σ x)ᵀ, sums over the tokens of a sample
B = (Σ g)(Σ g)ᵀ
"""

from facts.estimators.base import ClippedGradEstimator, KroneckerFactors
from facts.moments import LayerMoments, MeanInputGram, SummedGradGram
from facts.utils.options import options


@options
class KFACReduce(ClippedGradEstimator):
    """A = E[x̄ x̄ᵀ] with x̄ the mean over tokens, B = E[ḡ ḡᵀ] with ḡ the sum over tokens of clipped gradients."""

    token_local = False
    couples = False

    @property
    def moments(self):
        return MeanInputGram(), SummedGradGram(self.grad_clip)

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        (A,), (B,) = (moments[moment] for moment in self.moments)
        return KroneckerFactors(A=A / moments.num_samples, B=B / moments.num_samples)
