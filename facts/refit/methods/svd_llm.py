"""SVD-LLM's update: the left factors, by least squares on what the compressed blocks before give (Wang et al., 2024).

min over U of Σ ‖W x̃ - U V x̃‖², x̃ the inputs of the original block behind compressed ones; V stays.
"""

from dataclasses import replace

from torch import Tensor

from facts.decomposition.truncation import Decomposition
from facts.refit.base import Compressing, Refit
from facts.refit.flows import flows_of
from facts.refit.least_squares import best_left
from facts.utils.options import options


@options
class SVDLLMUpdate(Refit):
    """The layer-wise closed-form update of the first versions of the paper, and of its published code."""

    def refitted(self, work: Compressing, names: list[str]) -> dict[str, Decomposition]:
        return {name: self._updated(work, name, flows.own) for name, flows in flows_of(work, names).items()}

    def _updated(self, work: Compressing, name: str, own: Tensor) -> Decomposition:
        weight, decomposition = work.weight(name), work.truncated(name)
        left = best_left(weight @ own, own, decomposition.right.to(own))
        return replace(decomposition, left=left.to(decomposition.left), mean=None)
