"""CORP: queries, keys and hidden units, with ridge regression on those that stay (Zhang and Yang, 2026).

From the abstract and the published code, BOX-LEO/CORP; the paper's text was not read. Four things differ. The code
measures again after each MLP, the abstract and we once. It makes I + M symmetric, which the regression does not ask
for. It raises λ for scores too, where sums over tokens dwarf it. It has least widths, 64 hidden units and 8 features of
a head.

Legend: S and P are the indices that stay and that leave; q = right x and k = leftᵀ x of one head, without the keys'
bias, which the softmax ignores.
"""

from bisect import bisect_left
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facts.decomposition.parts import HiddenUnit, ScoreUnit
from facts.decomposition.truncation import Decomposition
from facts.estimators.whitening import lift_spectrum
from facts.modules.lowrank import LinearLayer, LowRankLayer
from facts.modules.modes import evaluating
from facts.modules.networks import run
from facts.moments import InputGram, InputSum
from facts.search import AllocationProblem, Plan, Search, SearchResult
from facts.utils.batches import shared, to_device
from facts.utils.options import Positive, options


@options
class CORPSearch(Search):
    """Queries and keys, and hidden units, keep one share, the largest in thousandths that fits; all else stays dense.

    Features of a head stay by the mean of q_j² k_j² over tokens, hidden units by that of x_j² times the share of tokens
    with |x_j| above `active` times the root mean square of all. `ridge` is λ, raised for hidden units to that of oracle
    approximating shrinkage.
    """

    ridge: Positive = 1e-3
    active: Positive = 0.01

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        if not problem.calibration.units:
            raise ValueError("CORP narrows units: choose parts=units, or another search")
        plan = self.plan(problem)
        return SearchResult(plan, decompositions=self.decompositions(problem, plan))

    def plan(self, problem: AllocationProblem) -> Plan:
        def keeping(thousandths: int) -> Plan:
            ranks = {name: problem.rank_of_ratio(name, thousandths / 1000) for name in problem.parts}
            cut = {name for name, part in problem.parts.items() if isinstance(part, ScoreUnit | HiddenUnit)}
            return {name: rank if name in cut else None for name, rank in ranks.items()}

        most = bisect_left(range(1, 1001), True, key=lambda thousandths: not problem.fits(keeping(thousandths)))
        if not most:
            raise ValueError("CORP leaves values and outputs as they are, which cost more than the budget: raise it")
        return keeping(most)

    def decompositions(self, problem: AllocationProblem, plan: Plan) -> dict[str, Decomposition]:
        """The decompositions; of units that get narrower only the components that stay."""
        calibration, made = problem.calibration, dict(problem.decompositions)
        ranks = {call: rank for name, unit in calibration.units.items() if (rank := plan[name]) for call in unit.calls}
        layers, moments = (
            {call: calibration.calls[call] for call in ranks},
            calibration.moments((InputGram(), InputSum())),
        )
        for call, sums in self.sums(problem, layers).items():
            layer, found = layers[call], moments[call]
            size, count = layer.in_features, found.num_tokens  # moments may be of [x, 1], for a bias
            gram, total = found[InputGram()][0].double()[:size, :size], found[InputSum()][0].double()[:size]
            if isinstance(layer, LowRankLayer):
                made[call] = without_features(layer, gram, sums, ranks[call], self.ridge)
            else:
                made[call] = without_units(layer, gram, total, count, gram.diagonal() * sums, ranks[call], self.ridge)
        return made

    def sums(self, problem: AllocationProblem, layers: Mapping[str, LinearLayer]) -> dict[str, Tensor]:
        """For each call of a unit the sum over tokens of q_j² k_j², or of whether hidden unit j is active."""
        sizes = {
            call: layer.rank if isinstance(layer, LowRankLayer) else layer.in_features for call, layer in layers.items()
        }
        sums = {call: torch.zeros(size, dtype=torch.float64, device=problem.device) for call, size in sizes.items()}

        def add(call: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            x = inputs[0].flatten(0, -2)
            if isinstance(layer, LowRankLayer):
                left, right = layer.factors()
                sums[call] += (F.linear(x, right) * (x[:, : len(left)] @ left)).square().sum(dim=0)
            else:
                sums[call] += (x.abs() > self.active * x.square().mean().sqrt()).sum(dim=0)

        with ExitStack() as stack, torch.no_grad(), evaluating(problem.network):
            for call, layer in layers.items():
                stack.enter_context(layer.register_forward_pre_hook(partial(add, call)))
            for inputs, _ in shared(problem.training_batches(), sums=sums.values()):
                run(problem.network, to_device(inputs, problem.device))
        return sums


def without_features(layer: LowRankLayer, gram: Tensor, scores: Tensor, rank: int, ridge: float) -> Decomposition:
    """The `rank` features of a head with the highest scores, for G = Σ x xᵀ.

    Of all M, q_Sᵀ (I + M) k_S comes nearest to qᵀ k, over all pairs of a query and a key, plus λ ‖M‖²: M solves
    Q_SS M K_SS + λ M = Q_SP K_PS with Q = Σ q qᵀ and K = Σ k kᵀ.
    """
    left, right = (factor.detach().double() for factor in layer.factors())
    energies, order = scores.sort(descending=True)
    S, P = order[:rank], order[rank:]
    Q, K = right @ gram @ right.T, left.T @ gram[: len(left), : len(left)] @ left
    (q, U), (k, V) = (torch.linalg.eigh(lift_spectrum(gram[S][:, S])) for gram in (Q, K))  # sums are in float32
    M = U @ (U.T @ Q[S][:, P] @ K[P][:, S] @ V / (q[:, None] * k + ridge)) @ V.T
    return Decomposition(left[:, S].to(layer.weight), (right[S] + M.T @ right[S]).to(layer.weight), energies[:rank])


def without_units(
    layer: LinearLayer, gram: Tensor, total: Tensor, count: int, scores: Tensor, rank: int, ridge: float
) -> Decomposition:
    """The `rank` inputs of a layer with the highest scores, for Σ x xᵀ and Σ x over `count` tokens.

    With the covariance C, x_P is nearly B x_S + c, B = C_PS (C_SS + λ I)⁻¹: the weight is W_S + W_P B, and the bias
    keeps the mean output. Without a bias there is no c, and C is not less the mean.
    """
    energies, order = scores.sort(descending=True)
    S, P = order[:rank], order[rank:]
    mean = total / count * (layer.bias is not None)
    C = gram / count - torch.outer(mean, mean)
    C_SS = C[S][:, S]
    identity = torch.eye(len(scores)).to(C)
    B = torch.linalg.solve(C_SS + max(ridge, shrinkage(C_SS, count)) * identity[:rank, :rank], C[S][:, P]).T
    weight = layer.weight.detach().double()
    left = (weight[:, S] + weight[:, P] @ B).to(layer.weight)
    return Decomposition(left, identity[S].to(layer.weight), energies[:rank], mean=mean, order=order)


def shrinkage(covariance: Tensor, count: int) -> float:
    """λ of oracle approximating shrinkage, for a covariance `[p, p]` of so many vectors (Chen et al., 2010)."""
    p, trace, squares = len(covariance), covariance.trace(), covariance.square().sum()
    share = ((1 - 2 / p) * squares + trace**2) / ((count + 1 - 2 / p) * (squares - trace**2 / p))
    return (share.nan_to_num(nan=1.0).clamp(max=1) * trace / p).item()
