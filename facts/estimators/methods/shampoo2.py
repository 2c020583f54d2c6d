"""Shampoo²: all pairs of tokens, one power iteration on the whole Fisher (Morwani et al., 2024).

A = Σ DᵀD, D the weight gradient of a sample
B = Σ DDᵀ
"""

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from facts.estimators.base import KroneckerFactors, TwoSidedEstimator, unit_trace
from facts.moments import LayerMoments, SampleGradGrams


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Shampoo2(TwoSidedEstimator):
    """A = E[DᵀD], B = E[DDᵀ] / E[‖D‖²] with D = Σ_t g_t x_tᵀ the weight gradient of one sample."""

    token_local = False
    couples = True

    @property
    def moments(self):
        return (SampleGradGrams(),)

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        A, B = moments[SampleGradGrams()]
        return KroneckerFactors(A=A / moments.num_samples, B=unit_trace(B))
