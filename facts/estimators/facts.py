"""FACTS: token-local aggregation, activation-gradient coupling kept (paper, theorem 4.2)."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from facts.estimators.base import KroneckerFactors, TwoSidedEstimator, unit_trace
from facts.moments import GradWeightedInputGram, InputWeightedGradGram, LayerMoments


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class FACTS(TwoSidedEstimator):
    """One token-wise power iteration from the identity.

    A = E[Σ_t ‖g_t‖² x_t x_tᵀ], B = E[Σ_t ‖x_t‖² g_t g_tᵀ] / E[Σ_t ‖x_t‖² ‖g_t‖²]. `grad_clip` bounds the Frobenius
    norm of each sample's output gradient; `normalize: batch` divides each batch's A by its trace (Algorithm 2 has
    both, without saying how much). The defaults do neither: every sample weighs the same.
    """

    grad_clip: Annotated[float, Field(gt=0)] | None = None
    normalize: Literal["none", "batch"] = "none"

    @property
    def moments(self):
        return (
            GradWeightedInputGram(grad_clip=self.grad_clip, normalize=self.normalize),
            InputWeightedGradGram(grad_clip=self.grad_clip),
        )

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        (A,), (B,) = (moments[moment] for moment in self.moments)
        return KroneckerFactors(A=A / moments.num_samples, B=unit_trace(B))
