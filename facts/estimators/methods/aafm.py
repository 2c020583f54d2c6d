"""AAFM: principal components of the outputs, whose mean goes into the bias (Yu and Wu, AAAI 2023).

A = covariance of x
B = I
"""

import torch

from facts.estimators.base import Estimator, KroneckerFactors
from facts.moments import InputGram, InputSum, LayerMoments
from facts.utils.options import options


@options
class AAFM(Estimator):
    """A = mean (x - x̄)(x - x̄)ᵀ, B = I, and a bias that keeps the output at x̄ exact.

    The best approximation in this metric projects the outputs onto their first principal components. A layer without
    a bias gets none: its A is the mean of x xᵀ.
    """

    @property
    def moments(self):
        return InputGram(), InputSum()

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        (gram,), (total,) = moments[InputGram()], moments[InputSum()]
        mean = total.double() / moments.num_tokens
        return KroneckerFactors(A=gram.double() / moments.num_tokens - torch.outer(mean, mean), mean=mean)
