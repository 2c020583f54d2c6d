"""Shampoo²: all pairs of tokens, one power iteration on the whole Fisher (Morwani et al., 2024).

A = Σ DᵀD, D the weight gradient of a sample
B = Σ DDᵀ
"""

from facts.estimators.base import KroneckerFactors, WeightedInputEstimator, unit_trace
from facts.moments import LayerMoments, SampleGradGrams
from facts.utils.options import options


@options
class Shampoo2(WeightedInputEstimator):
    """A = E[DᵀD], B = E[DDᵀ] / E[‖D‖²] of clipped gradients, with D = Σ_t g_t x_tᵀ the weight gradient of a sample."""

    token_local = False
    couples = True

    @property
    def moments(self):
        return SampleGradGrams(self.grad_clip, self.normalize), *self.plain_moments

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        A, B = moments[self.moments[0]]
        A = self.with_plain(unit_trace(A) * B.trace() / moments.num_samples, moments)
        return KroneckerFactors(A=A, B=unit_trace(B))
