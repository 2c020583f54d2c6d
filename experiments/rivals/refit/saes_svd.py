"""SAES-SVD: one decomposition of a mixture of local and original outputs (Hu et al., ICLR 2026).

min over rank k of Σ ‖W' x̃ - W (β x + (1 - β) x̃)‖²: x are inputs in the original, x̃ those after compressed layers.
Based only on the abstract: the paper's search for β and its range were not read.
"""

from dataclasses import replace

import torch

from facts.decomposition.truncation import Decomposition, decompose
from facts.estimators.base import KroneckerFactors
from facts.estimators.whitening import NEAR_SINGULAR
from facts.refit.base import Refit, RefitProblem
from facts.refit.least_squares import InputGrams, input_grams
from facts.utils.options import Share, options


@options
class SAESSVD(Refit):
    """Layer by layer, use the β of `shares` whose mixture keeps most of its energy at the plan's rank.

    Only the energy that a linear map of x̃ can reach counts.
    """

    by_block = False

    shares: tuple[Share, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

    def refitted(self, problem: RefitProblem, names: list[str]) -> dict[str, Decomposition]:
        return {name: self._mixed(problem, name, grams) for name, grams in input_grams(problem, names).items()}

    def _mixed(self, problem: RefitProblem, name: str, grams: InputGrams) -> Decomposition:
        weight, kind, rank = problem.weight(name), problem.decompositions[name].left.dtype, problem.rank(name)
        inverse = torch.linalg.pinv(grams.compressed, rtol=NEAR_SINGULAR, hermitian=True)
        mixtures = (weight @ grams.compressed.lerp(grams.cross, share) @ inverse for share in self.shares)
        found = [decompose(mixture, KroneckerFactors(A=grams.compressed, repair=None)) for mixture in mixtures]
        best = max(found, key=lambda each: (each.energies[:rank].sum() / each.energies.sum()).item())
        return replace(best, left=best.left[:, :rank].to(kind), right=best.right[:rank].to(kind), mean=None)
