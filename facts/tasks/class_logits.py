"""What tasks have in common whose networks say how likely each class is, for an image or for every next token."""

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from facts.moments.losses import kl_divergence, summed_cross_entropy
from facts.tasks.base import Task


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class ClassLogits(Task):
    """Cross-entropy for the labels, Kullback-Leibler divergence between networks."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return summed_cross_entropy(outputs, targets)

    def output_error(self, original: Tensor, changed: Tensor) -> Tensor:
        return kl_divergence(original, changed)

    def distillation_error(self, original: Tensor, changed: Tensor, temperature: float) -> Tensor:
        """The gradient of the softened outputs shrinks with the square of the temperature, which is made up for."""
        return temperature**2 * kl_divergence(original / temperature, changed / temperature)
