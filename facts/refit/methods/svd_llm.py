"""SVD-LLM's update: left factors, by least squares on the outputs of earlier, compressed blocks (Wang et al., 2024).

min over U of Σ ‖W x̃ - U V x̃‖², x̃ the inputs in the original block after compressed ones; V stays the same.
"""

from dataclasses import replace

from facts.decomposition.truncation import Decomposition
from facts.refit.base import Refit, RefitProblem
from facts.refit.least_squares import best_left, input_grams
from facts.utils.options import options


@options
class SVDLLMUpdate(Refit):
    """The layer-wise closed-form update of the first versions of the paper, and of its published code."""

    def refitted(self, problem: RefitProblem, names: list[str]) -> dict[str, Decomposition]:
        updated = {}
        for name, grams in input_grams(problem, names).items():
            gram, decomposition = grams.compressed, problem.truncated(name)
            left = best_left(problem.weight(name) @ gram, gram, decomposition.right.to(gram))
            updated[name] = replace(decomposition, left=left.to(decomposition.left), mean=None)
        return updated
