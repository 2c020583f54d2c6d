"""SVD-LLM: the smallest error of the layer's output (Wang et al., 2024)."""

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from facts.estimators.base import Estimator, KroneckerFactors
from facts.moments import InputGram, LayerMoments
from facts.whitening import lift_spectrum_to_1e_6


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class SVDLLM(Estimator):
    """A = Σ XᵀX, B = I; where A is not positive definite, (1e-6 - λ_min) I is added."""

    @property
    def moments(self):
        return (InputGram(),)

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        (A,) = moments[InputGram()]
        return KroneckerFactors(A=A, repair=lift_spectrum_to_1e_6)
