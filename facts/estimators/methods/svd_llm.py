"""SVD-LLM: activations only; minimises the error of each layer's output (Wang et al., 2024).

A = Σ x xᵀ
B = I
"""

from facts.estimators.base import Estimator, KroneckerFactors
from facts.estimators.whitening import lift_spectrum_to_1e_6
from facts.moments import InputGram, LayerMoments
from facts.utils.options import options


@options
class SVDLLM(Estimator):
    """A = Σ XᵀX, B = I; if A is not positive definite, (1e-6 - λ_min) I is added."""

    @property
    def moments(self):
        return (InputGram(),)

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        (A,) = moments[InputGram()]
        return KroneckerFactors(A=A, repair=lift_spectrum_to_1e_6)
