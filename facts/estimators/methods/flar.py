"""FLAR: `svd_llm` with a shrunk covariance (FLAR-SVD; Thoma et al., 2025).

A = Σ x xᵀ, shrunk by Ledoit and Wolf's rule
B = I
"""

from typing import Literal

from facts.estimators.base import Estimator, KroneckerFactors
from facts.moments import InputFourthMoment, InputGram, LayerMoments, LiteralShrunkGram
from facts.utils.options import options


@options
class FLAR(Estimator):
    """A = the mean x xᵀ over tokens, B = I, A shrunk towards mean(diag A) I.

    `ledoit_wolf` shrinks by the optimal amount of Ledoit and Wolf (2004) for uncentred data; `literal` is the published
    code's rule for each batch, whose amount is only rounding error.
    """

    covariance_shrinkage: Literal["ledoit_wolf", "literal"] = "ledoit_wolf"

    @property
    def moments(self):
        if self.covariance_shrinkage == "literal":
            return (LiteralShrunkGram(),)
        return InputGram(), InputFourthMoment()

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        (A,) = moments[self.moments[0]]
        return KroneckerFactors(A=A / moments.num_tokens)

    def shrinkage(self, moments: LayerMoments) -> tuple[float, float]:
        if self.covariance_shrinkage == "literal":
            return 0.0, 0.0
        (gram,), (fourth,) = moments[InputGram()], moments[InputFourthMoment()]
        covariance, count, size = gram.double() / moments.num_tokens, moments.num_tokens, len(gram)
        energy = covariance.square().sum()
        distance = energy - covariance.trace().square() / size
        noise = (fourth.double() / count - energy) / count
        return 0.0, float((noise.clamp(min=0) / distance.clamp(min=1e-300)).clamp(max=1))
