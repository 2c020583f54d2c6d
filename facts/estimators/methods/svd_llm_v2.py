"""SVD-LLM V2: `svd_llm` by two SVDs; drops directions without data (Wang et al., NAACL 2025).

A = Σ x xᵀ
B = I
"""

from facts.estimators.base import Estimator, KroneckerFactors
from facts.moments import InputGram, LayerMoments
from facts.utils.options import options


@options
class SVDLLMV2(Estimator):
    """A = Σ XᵀX, B = I; the root of A is U √S by its SVD, and directions in which A is singular get no weight.

    If A is positive definite, the weights are those of `svd_llm`.
    """

    @property
    def moments(self):
        return (InputGram(),)

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        (A,) = moments[InputGram()]
        return KroneckerFactors(A=A, repair=None)
