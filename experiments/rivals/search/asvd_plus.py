"""ASVD+: ASVD's threshold, with raised errors of early blocks (a rival in Thoma et al., ICML 2026)."""

import random
from collections.abc import Mapping

import numpy as np
from torch import nn

from experiments.rivals.search.flora import Supernet
from facts.moments.checkpointing import blocks_of
from facts.search import AllocationProblem, Search, SearchResult
from facts.search.base import Ratios
from facts.search.methods.asvd import plan_behind_cut
from facts.search.sensitivity.measured import Sensitivity
from facts.utils.options import Count, NotNegative, options


@options
class ASVDPlusSearch(Search):
    """Raise errors in different ways, and take the plan whose network's outputs are the nearest to the original's.

    A layer in block b of B has its errors times 1 + γ h(b); h is Σ_{k >= b} (k + 1)^-α, scaled to fall from 1 in the
    first block to 0 in the last. There are `num_trials` random draws of α and γ, up to `max_decay` and `max_bias`.
    """

    ratios: Ratios = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    num_trials: Count = 10
    max_decay: NotNegative = 3.0
    max_bias: NotNegative = 7.0
    seed: int = 0

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        offered = problem.ranks_of_ratios(self.ratios)
        profile = Sensitivity(problem).profile(offered)
        blocks, rng = block_numbers(problem.model, problem.layers), random.Random(self.seed)
        plans = []
        for _ in range(self.num_trials):
            decay, bias = rng.uniform(0, self.max_decay), rng.uniform(0, self.max_bias)
            weights = block_weights(1 + max(blocks.values()), decay, bias)
            raised = {
                name: {rank: weights[blocks[name]] * error for rank, error in errors.items()}
                for name, errors in profile.items()
            }
            if (plan := plan_behind_cut(problem, raised)) not in plans:
                plans.append(plan)
        errors = Supernet(problem, {name: [*ranks, None] for name, ranks in offered.items()}).errors(plans)
        return SearchResult(plans[int(np.argmin(errors))], profile=profile)


def block_numbers(model: nn.Module, layers: Mapping[str, nn.Linear]) -> dict[str, int]:
    """Each layer's block, from 0 in the network's order; a layer outside of all blocks is in that of the one before."""
    numbers: dict[nn.Module, int] = {}
    found, last = {}, 0
    for name, layer in layers.items():
        for block in blocks_of(model, [layer]):  # one at most
            last = numbers.setdefault(block, len(numbers))
        found[name] = last
    return found


def block_weights(num_blocks: int, decay: float, bias: float) -> np.ndarray:
    """Factors `[num_blocks]` of the blocks' errors, from 1 + `bias` to 1; 1 if there is but one block."""
    terms = np.arange(1.0, num_blocks + 1) ** -decay
    sums = terms[::-1].cumsum()[::-1]
    return 1 + bias * (sums - sums[-1]) / max(sums[0] - sums[-1], np.finfo(float).tiny)
