"""CORP: queries, keys and hidden units, with ridge regression on those that stay (Zhang and Yang, 2026).

From the abstract and the published code, BOX-LEO/CORP; the paper's text was not read. Four things differ. The code
measures again after each MLP, while the abstract and this file measure once. It makes I + M symmetric, which the
regression does not require. It also raises λ for scores, where sums over tokens dwarf it. It has minimum widths: 64
hidden units, and 8 features per head.

Legend: S and P are the kept and the removed indices; q and k are the queries and keys of one head, without the keys'
bias, which the softmax ignores.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.baselines.units import key_and_value_grams, run_with_hooks
from facts.decomposition.truncation import Decomposition
from facts.estimators.whitening import lift_spectrum
from facts.modules.lowrank import LinearLayer, LowRankLayer
from facts.moments import InputGram, InputSum
from facts.parts.attention import Heads, ScoreUnit
from facts.parts.base import Part
from facts.parts.hidden import HiddenUnit
from facts.search import AllocationProblem, Plan, Search, SearchResult
from facts.utils.options import Positive, options

Values = Callable[[Tensor], Tensor]
CUT = (ScoreUnit, HiddenUnit)  # the parts that it cuts; others stay dense


@options
class CORPSearch(Search):
    """Queries, keys and hidden units keep one share, the largest in thousandths that fits; the rest stays dense.

    Features of a head are kept by the mean of q_j² k_j² over tokens, hidden units by that of x_j² times the share of
    tokens with |x_j| above `active` times the root mean square of all. `ridge` is λ; for hidden units, it is at least
    that of oracle approximating shrinkage.
    """

    ridge: Positive = 1e-3
    active: Positive = 0.01

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        keys = key_and_value_grams(problem)
        plan = self.plan(problem)
        return SearchResult(plan, decompositions=self.decompositions(problem, plan, keys))

    def plan(self, problem: AllocationProblem) -> Plan:
        def keeping(thousandths: int) -> Plan:
            return {
                name: part.rank_of_ratio(thousandths / 1000) if isinstance(part, CUT) else None
                for name, part in problem.parts.items()
            }

        most = bisect_left(range(1, 1001), True, key=lambda thousandths: not problem.fits(keeping(thousandths)))
        if not most:
            raise ValueError("CORP leaves values and outputs as they are, which cost more than the budget: raise it")
        return keeping(most)

    def decompositions(
        self, problem: AllocationProblem, plan: Plan, keys: Mapping[str, Tensor]
    ) -> dict[str, Decomposition]:
        """Make the decompositions; narrowed units have only the components that are kept."""
        calibration, made = problem.calibration, dict(problem.decompositions)
        ranks = {
            call: rank for name, unit in calibration.units.items() if (rank := plan[name]) for call in unit.linears
        }
        moments = calibration.moments((InputGram(), InputSum()))
        for call, sums in self.sums(problem, ranks.keys()).items():
            layer, found = calibration.linears[call], moments[call]
            size, count = layer.in_features, found.num_tokens  # moments may be of [x, 1], for a bias
            gram, total = found[InputGram()][0].double()[:size, :size], found[InputSum()][0].double()[:size]
            if isinstance(layer, LowRankLayer):
                made[call] = without_features(layer, gram, keys[call] * count, sums, ranks[call], self.ridge)
            else:
                made[call] = without_units(layer, gram, total, count, gram.diagonal() * sums, ranks[call], self.ridge)
        return made

    def sums(self, problem: AllocationProblem, calls: Set[str]) -> dict[str, Tensor]:
        """Sum over tokens: q_j² k_j² for calls of score products, and how many have unit j active for MLPs."""
        units = [unit for unit in problem.calibration.units.values() if not calls.isdisjoint(unit.linears)]
        sums: dict[str, Tensor] = {}
        hooks = {}

        def add(owner: str, values: Values, module: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
            sums[owner] += values(inputs[0].flatten(0, -2)).sum(dim=0)

        for unit in units:
            module, values = self.watched(unit, problem.model)
            hooks[module] = partial(add, unit.owner, values)
            sums[unit.owner] = torch.zeros(len(unit.linears), unit.largest, dtype=torch.float64, device=problem.device)
        run_with_hooks(problem, hooks)
        return {call: each for unit in units for call, each in zip(unit.linears, sums[unit.owner], strict=True)}

    def watched(self, unit: Part, model: nn.Module) -> tuple[nn.Module, Values]:
        """The module to watch for a unit that is cut, and from its inputs the values to add up."""
        if isinstance(unit, ScoreUnit):
            module, heads = unit.heads(model)
            return module, partial(squared_products, heads)
        return model.get_submodule(unit.linears[0]), self.active_units

    def active_units(self, x: Tensor) -> Tensor:
        return (x.abs() > self.active * x.square().mean().sqrt())[:, None]


def squared_products(heads: Heads, x: Tensor) -> Tensor:
    """q_j² k_j² of each token `[T, H, d]`."""
    queries, keys = (torch.einsum("td,hkd->thk", x, weights) for weights in (heads.queries, heads.keys))
    if heads.query_bias is not None:
        queries = queries + heads.query_bias
    return (queries * keys).square()


def without_features(
    layer: LowRankLayer, of_queries: Tensor, of_keys: Tensor, scores: Tensor, rank: int, ridge: float
) -> Decomposition:
    """Keep a head's `rank` features with the highest scores, given Σ x xᵀ and Σ y yᵀ with q = right x and k = leftᵀ y.

    M minimises (q_Sᵀ (I + M) k_S - qᵀ k)², summed over all pairs of a query and a key, plus λ ‖M‖²: it solves
    Q_SS M K_SS + λ M = Q_SP K_PS with Q = Σ q qᵀ and K = Σ k kᵀ.
    """
    left, right = (factor.detach().double() for factor in layer.factors())
    energies, order = scores.sort(descending=True)
    S, P = order[:rank], order[rank:]
    Q, K = right @ of_queries @ right.T, left.T @ of_keys @ left
    (q, U), (k, V) = (torch.linalg.eigh(lift_spectrum(gram[S][:, S])) for gram in (Q, K))  # sums are in float32
    M = U @ (U.T @ Q[S][:, P] @ K[P][:, S] @ V / (q[:, None] * k + ridge)) @ V.T
    return Decomposition(left[:, S].to(layer.weight), (right[S] + M.T @ right[S]).to(layer.weight), energies[:rank])


def without_units(
    layer: LinearLayer, gram: Tensor, total: Tensor, count: int, scores: Tensor, rank: int, ridge: float
) -> Decomposition:
    """Keep a layer's `rank` inputs with the highest scores, given Σ x xᵀ and Σ x over `count` tokens.

    With the covariance C, x_P is nearly B x_S + c, where B = C_PS (C_SS + λ I)⁻¹: the weight is W_S + W_P B, and the
    bias keeps the mean output. Without a bias there is no c, and C is not centred.
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
    """λ of oracle approximating shrinkage, for a covariance `[p, p]` of `count` vectors (Chen et al., 2010)."""
    p, trace, squares = len(covariance), covariance.trace(), covariance.square().sum()
    share = ((1 - 2 / p) * squares + trace**2) / ((count + 1 - 2 / p) * (squares - trace**2 / p))
    return (share.nan_to_num(nan=1.0).clamp(max=1) * trace / p).item()
