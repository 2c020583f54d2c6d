"""Shared parts of tasks whose networks give class logits, for an image or for every next token."""

from torch import Tensor

from facts.moments.losses import kl_divergence, summed_cross_entropy
from facts.tasks.base import Task
from facts.utils.options import options


@options
class ClassLogits(Task):
    """Cross-entropy on labels, Kullback-Leibler divergence between networks."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return summed_cross_entropy(outputs, targets)

    def output_error(self, original: Tensor, changed: Tensor) -> Tensor:
        return kl_divergence(original, changed)

    def distillation_error(self, original: Tensor, changed: Tensor, temperature: float) -> Tensor:
        """KL divergence of the softened outputs, times the squared temperature, by which their gradient shrinks."""
        return temperature**2 * kl_divergence(original / temperature, changed / temperature)
