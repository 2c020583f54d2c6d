"""SVD-LLM V2: layers of one type share the cut in proportion to 1 / log of their loss (Wang et al., NAACL 2025)."""

import math
from collections import defaultdict

from facts.search.base import AllocationProblem, Search, SearchResult
from facts.utils.options import options


@options
class SVDLLMV2Search(Search):
    """Layers of one type and cost lose shares in proportion to 1 / log L; the tightest bound sets the mean share.

    L is the Frobenius loss of a layer at the common ratio, the root of the energy discarded there. Its scale matters:
    losses of `svd_llm` are sums over tokens, as published. If a loss in a group is 1 or less, all its layers lose equal
    shares. Every layer keeps at least rank 1; the others in its group lose more to compensate.
    """

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        return SearchResult(dict(problem.at_common_ratio(lambda ratio: _ranks(problem, ratio))))


def _ranks(problem: AllocationProblem, ratio: float) -> dict[str, int]:
    groups: dict[tuple, list[str]] = defaultdict(list)
    for name, layer in problem.layers.items():
        type_ = tuple(part for part in name.split(".") if not part.isdigit())
        groups[type_, layer.weight.shape, problem.cost(name, None)].append(name)
    ranks: dict[str, int] = {}
    for names in groups.values():
        lost = [problem.decompositions[name].energies[problem.parts[name].rank_of_ratio(ratio) :] for name in names]
        losses = [energies.sum().sqrt().item() for energies in lost]
        weights = [1 / math.log(loss) for loss in losses] if min(losses) > 1 else [1.0] * len(names)
        d_out, d_in = problem.layers[names[0]].weight.shape
        smallest = problem.parts[names[0]].num_weights(1) / (d_out * d_in)
        removed = _removed_shares(weights, 1 - ratio, max(0.0, 1 - smallest))
        # Rounded, so that sums in another order give the same rank.
        ranks |= {
            name: problem.parts[name].rank_of_ratio(round(1 - share, 12))
            for name, share in zip(names, removed, strict=True)
        }
    return {name: ranks[name] for name in problem.layers}


def _removed_shares(weights: list[float], mean: float, most: float) -> list[float]:
    """Shares in proportion to the weights with the given `mean`, each at most `most`; the others compensate."""
    shares = [0.0] * len(weights)
    order = sorted(range(len(weights)), key=lambda index: -weights[index])
    left = mean * len(weights)
    for place, index in enumerate(order):
        shares[index] = min(most, left * weights[index] / math.fsum(weights[other] for other in order[place:]))
        left -= shares[index]
    return shares
