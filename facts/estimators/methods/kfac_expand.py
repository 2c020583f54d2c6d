"""KFAC-expand: K-FAC that treats each token as a separate sample (paper, eq. kfac_expand).

A = Σ x xᵀ
B = Σ g gᵀ
"""

from facts.estimators.base import ClippedGradEstimator, KroneckerFactors
from facts.moments import GradGram, InputGram, LayerMoments
from facts.utils.options import options


@options
class KFACExpand(ClippedGradEstimator):
    """A = mean over samples and tokens of x xᵀ, B = mean over samples of Σ_t g_t g_tᵀ, of clipped gradients."""

    token_local = True
    couples = False

    @property
    def moments(self):
        return InputGram(), GradGram(self.grad_clip)

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        (A,), (B,) = (moments[moment] for moment in self.moments)
        return KroneckerFactors(A=A / moments.num_tokens, B=B / moments.num_samples)
