"""MemViT: a low-rank residual that gives back what truncation has taken from the outputs (Azizi et al., 2024).

min over P, Q of Σ ‖W x - U V x̃ - P Q x̃‖²: x are the inputs in the original, x̃ those behind compressed layers.
"""

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field

from facts.decomposition.truncation import Decomposition, decompose
from facts.estimators.base import KroneckerFactors
from facts.estimators.whitening import NEAR_SINGULAR
from facts.modules.forms import FORMS
from facts.refit.base import Compressing, Refit
from facts.refit.flows import Flows, flows_of
from facts.utils.options import options


@options
class MemViTResidual(Refit):
    """U V keeps its leading components, P Q gets the other ranks of the plan, so that the cost stays.

    P Q has `residual_share` of the dense layer's weights, but U V has rank 1 at least. Both are stored as one layer.
    """

    by_block = False

    residual_share: Annotated[float, Field(gt=0, lt=1)] = 0.05

    def refitted(self, work: Compressing, names: list[str]) -> dict[str, Decomposition]:
        return {name: self._with_residual(work, name, flows) for name, flows in flows_of(work, names).items()}

    def _with_residual(self, work: Compressing, name: str, flows: Flows) -> Decomposition:
        weight, decomposition = work.weight(name), work.truncated(name)
        rank = len(decomposition.energies)
        d_out, d_in = weight.shape
        residual_rank = min(rank - 1, FORMS["plain"].rank_of_ratio(d_out, d_in, self.residual_share))
        if not residual_rank:
            return decomposition
        left, right = (factor.to(weight) for factor in decomposition.truncate(rank - residual_rank))
        lost = weight @ flows.joint - left @ (right @ flows.own)
        best = lost @ torch.linalg.pinv(flows.own, rtol=NEAR_SINGULAR, hermitian=True)
        residual = decompose(best, KroneckerFactors(A=flows.own, repair=None)).truncate(residual_rank)
        kind = decomposition.left.dtype
        left, right = torch.cat([left, residual[0]], dim=1).to(kind), torch.cat([right, residual[1]]).to(kind)
        return replace(decomposition, left=left, right=right, mean=None)
