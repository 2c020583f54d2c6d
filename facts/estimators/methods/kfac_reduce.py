"""KFAC-reduce: K-FAC on sums over tokens (paper, eq. kfac_reduce).

A = (Σ x)(Σ x)ᵀ, sums over the tokens of a sample
B = (Σ g)(Σ g)ᵀ
"""

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from facts.estimators.base import KroneckerFactors, TwoSidedEstimator
from facts.moments import LayerMoments, MeanInputGram, SummedGradGram


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class KFACReduce(TwoSidedEstimator):
    """A = E[x̄ x̄ᵀ] with x̄ the mean over tokens, B = E[ḡ ḡᵀ] with ḡ the sum over tokens."""

    token_local = False
    couples = False

    @property
    def moments(self):
        return MeanInputGram(), SummedGradGram()

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        (A,), (B,) = moments[MeanInputGram()], moments[SummedGradGram()]
        return KroneckerFactors(A=A / moments.num_samples, B=B / moments.num_samples)
