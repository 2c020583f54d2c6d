"""Randomized SVD: an SVD by random projection instead of the exact one, without oversampling (Halko et al., 2011).

It uses as many random vectors as the rank, and power iterations, like PyTorch's `svd_lowrank`.
"""

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field

from facts.decomposition.truncation import Decomposition
from facts.refit.base import Refit, RefitProblem
from facts.utils.options import Seed, options
from facts.utils.random import seeded


@options
class RandomizedSVD(Refit):
    """The factors that `torch.svd_lowrank(whitened weight, q=rank)` gives, with a new draw for each layer and rank."""

    fits_bias = True

    num_iterations: Annotated[int, Field(ge=0)] = 2
    seed: Seed = 0

    def refitted(self, problem: RefitProblem, names: list[str]) -> dict[str, Decomposition]:
        return {name: self.randomized(name, problem.decompositions[name], problem.rank(name)) for name in names}

    def randomized(self, name: str, exact: Decomposition, rank: int) -> Decomposition:
        """Draw only for diag(s) of U diag(s) Vᵀ: Gaussian vectors have the same distribution in any basis."""
        s = exact.energies.double().cpu().sqrt()
        with seeded(self.seed, name, rank):
            u, values, v = torch.svd_lowrank(s.diag(), q=rank, niter=self.num_iterations)
        if len(exact.left) < exact.right.shape[1]:  # svd_lowrank projects the longer side of a matrix
            u, v = v, u
        undone = torch.where(s > 0, s.rsqrt(), 0)[:, None]  # each exact factor holds the root of s
        left, right = ((undone * basis * values.sqrt()).to(exact.left.device) for basis in (u, v))
        return replace(
            exact,
            left=(exact.left.double() @ left).to(exact.left),
            right=(right.T @ exact.right.double()).to(exact.right),
            energies=values.square().to(exact.energies),
        )
