"""MemViT: a low-rank residual that restores what truncation removes from the outputs (Azizi et al., 2024).

min over P, Q of Σ ‖W x - U V x̃ - P Q x̃‖²: x are the inputs in the original, x̃ those after compressed layers.
"""

from dataclasses import replace

import torch

from facts.decomposition.truncation import Decomposition, decompose
from facts.estimators.base import KroneckerFactors
from facts.estimators.whitening import NEAR_SINGULAR
from facts.modules.forms import FORMS
from facts.refit.base import Refit, RefitProblem
from facts.refit.least_squares import InputGrams, input_grams
from facts.utils.options import Ratio, options


@options
class MemViTResidual(Refit):
    """U V keeps its leading components, and P Q gets the plan's other ranks, so that the cost stays the same.

    P Q has `residual_share` of the dense layer's weights, but U V has at least rank 1. Both are stored as one layer.
    """

    by_block = False

    residual_share: Ratio = 0.05

    def refitted(self, problem: RefitProblem, names: list[str]) -> dict[str, Decomposition]:
        return {name: self._with_residual(problem, name, grams) for name, grams in input_grams(problem, names).items()}

    def _with_residual(self, problem: RefitProblem, name: str, grams: InputGrams) -> Decomposition:
        weight, decomposition, rank = problem.weight(name), problem.truncated(name), problem.rank(name)
        d_out, d_in = weight.shape
        residual_rank = min(rank - 1, FORMS["plain"].rank_of_ratio(d_out, d_in, self.residual_share))
        if not residual_rank:
            return decomposition
        left, right = (factor.to(weight) for factor in decomposition.truncate(rank - residual_rank))
        lost = weight @ grams.cross - left @ (right @ grams.compressed)
        best = lost @ torch.linalg.pinv(grams.compressed, rtol=NEAR_SINGULAR, hermitian=True)
        residual = decompose(best, KroneckerFactors(A=grams.compressed, repair=None)).truncate(residual_rank)
        kind = decomposition.left.dtype
        left, right = torch.cat([left, residual[0]], dim=1).to(kind), torch.cat([right, residual[1]]).to(kind)
        return replace(decomposition, left=left, right=right, mean=None)
