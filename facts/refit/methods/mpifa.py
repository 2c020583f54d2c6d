"""MPIFA's reconstruction: both factors, by least squares on a mixture of two outputs (Zhao et al., ICML 2025).

The target is W (λ x + (1 - λ) x̃): x are the inputs in the original network, x̃ those after compressed layers.
"""

from dataclasses import replace

from facts.decomposition.truncation import Decomposition
from facts.refit.base import Refit, RefitProblem
from facts.refit.least_squares import InputGrams, best_left, best_right, input_grams
from facts.utils.options import NotNegative, Share, options


@options
class MPIFA(Refit):
    """Fit first U, then V of U V x̃, layer by layer; `original_share` is λ.

    `ridge` times ‖U V - W‖² is added when V is fitted, which keeps the original weight on directions without data.
    """

    by_block = False

    original_share: Share = 0.25
    ridge: NotNegative = 1e-3

    def refitted(self, problem: RefitProblem, names: list[str]) -> dict[str, Decomposition]:
        return {name: self._updated(problem, name, grams) for name, grams in input_grams(problem, names).items()}

    def _updated(self, problem: RefitProblem, name: str, grams: InputGrams) -> Decomposition:
        weight, decomposition = problem.weight(name), problem.truncated(name)
        target = weight @ grams.compressed.lerp(grams.cross, self.original_share)
        left = best_left(target, grams.compressed, decomposition.right.to(target))
        right = best_right(target, grams.compressed, left, weight, self.ridge)
        kind = decomposition.left.dtype
        return replace(decomposition, left=left.to(kind), right=right.to(kind), mean=None)
