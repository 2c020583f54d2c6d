"""FACTS: activations and gradients together, token by token (paper, theorem 4.2).

A = Σ ‖g‖² x xᵀ
B = Σ ‖x‖² g gᵀ
"""

from collections.abc import Mapping
from typing import Any

from facts.estimators.base import Estimator, KroneckerFactors, WeightedInputEstimator, unit_trace
from facts.moments import GradWeightedInputGram, InputWeightedGradGram, LayerMoments, TokenPowerStep
from facts.utils.options import Count, options


@options
class FACTS(WeightedInputEstimator):
    """Token-wise power iterations from the identity; the paper takes one (Algorithm 2).

    A = E[Σ_t ‖g_t‖² x_t x_tᵀ], B = E[Σ_t ‖x_t‖² g_t g_tᵀ] / E[Σ_t ‖x_t‖² ‖g_t‖²], of clipped gradients. Each of
    `num_iterations` takes one data pass; without clipping and normalisation, the directions converge to those of the
    nearest Kronecker product of the token-local Fisher, whose trace is tr A tr B.
    """

    num_iterations: Count = 1

    token_local = True
    couples = True

    @property
    def moments(self):
        return (
            GradWeightedInputGram(grad_clip=self.grad_clip, normalize=self.normalize),
            InputWeightedGradGram(grad_clip=self.grad_clip),
            *self.plain_moments,
        )

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        (A,), (B,) = (moments[moment] for moment in self.moments[:2])
        A = self.with_plain(unit_trace(A) * B.trace() / moments.num_samples, moments)
        return KroneckerFactors(A=A, B=unit_trace(B))

    @property
    def num_passes(self):
        return self.num_iterations

    def refined(self, factors):
        return FACTSStep(facts=self, iteration=2, previous=factors)


@options
class FACTSStep(Estimator):
    """One more iteration: A ∝ E[Σ_t (g_tᵀ B g_t) x_t x_tᵀ], B ∝ E[Σ_t (x_tᵀ A x_t) g_t g_tᵀ], with the same traces."""

    facts: FACTS
    iteration: int
    previous: Mapping[str, Any]

    @property
    def moments(self):
        previous = {name: (factors.A, factors.B) for name, factors in self.previous.items()}
        clip, normalize = self.facts.grad_clip, self.facts.normalize
        step = TokenPowerStep(iteration=self.iteration, previous=previous, grad_clip=clip, normalize=normalize)
        return step, *self.facts.plain_moments

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        A, B, trace = moments[self.moments[0]]
        return KroneckerFactors(A=self.facts.with_plain(unit_trace(A) * trace, moments), B=unit_trace(B))

    def shrinkage(self, moments: LayerMoments) -> tuple[float, float]:
        return self.facts.shrinkage(moments)

    def refined(self, factors):
        return FACTSStep(facts=self.facts, iteration=self.iteration + 1, previous=factors)
