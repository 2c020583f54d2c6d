"""Shampoo²: all pairs of tokens, one power iteration on the whole Fisher (Morwani et al., 2024).

A = Σ DᵀD, D the weight gradient of a sample
B = Σ DDᵀ
"""

from facts.estimators.base import ClippedGradEstimator, KroneckerFactors, unit_trace
from facts.moments import LayerMoments, SampleGradGrams
from facts.moments.statistics import Normalize
from facts.utils.options import options


@options
class Shampoo2(ClippedGradEstimator):
    """A = E[DᵀD], B = E[DDᵀ] / E[‖D‖²] with D = Σ_t g_t x_tᵀ the weight gradient of one sample, of clipped gradients.

    With `normalize: batch` each batch has the same part in A.
    """

    normalize: Normalize = "batch"

    token_local = False
    couples = True

    @property
    def moments(self):
        return (SampleGradGrams(self.grad_clip, self.normalize),)

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        A, B = moments[self.moments[0]]
        return KroneckerFactors(A=unit_trace(A) * B.trace() / moments.num_samples, B=unit_trace(B))
