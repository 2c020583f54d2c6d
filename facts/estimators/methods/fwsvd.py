"""FW-SVD: squared gradients of each input feature (Hsu et al., 2022).

A = squared weight gradients, summed over outputs, on the diagonal
B = I
"""

from dataclasses import dataclass
from typing import Literal

from facts.estimators.base import Estimator, KroneckerFactors
from facts.moments import LayerMoments, Moment, SampleGradEnergy
from facts.utils.options import NotNegative, options


@options
class FWSVD(Estimator):
    """A = diag(f^exponent), B = I; up to a constant, f_j is the squared weight gradient averaged over outputs.

    Gradients are those of single samples, or of each batch's mean loss. Their squares are averaged.
    """

    exponent: NotNegative = 1.0
    gradients: Literal["sample", "batch"] = "sample"

    @property
    def moments(self):
        return (SampleGradEnergy() if self.gradients == "sample" else BatchGradEnergy(),)

    def factors(self, moments: LayerMoments) -> KroneckerFactors:
        (energy,) = moments[self.moments[0]]
        return KroneckerFactors(A=((energy / moments.num_samples) ** self.exponent).diag())


@dataclass(frozen=True)
class BatchGradEnergy(Moment):
    """Σ over batches of Σ_i D̄[i, j]² `[n]`, D̄ the mean weight gradient of the batch's samples."""

    def shapes(self, d_in, d_out):
        return ((d_in,),)

    def add(self, total, batch):
        gradient = batch.g.flatten(0, 1).T @ batch.x.flatten(0, 1) / batch.num_samples
        total[0].add_(gradient.square().sum(dim=0))
