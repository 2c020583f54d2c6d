"""The error model of LEMS and ASVD+: one measured divergence per layer, along the curve of lost energy.

From the published code, `lems-svd/lems` (Thoma et al., ICML 2026), but with our candidate ranks, and with random draws
of the bias instead of Optuna's.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import numpy as np
from torch import Tensor, nn

from facts.calibration.distance import distance
from facts.modules.networks import reads_tokens
from facts.moments.checkpointing import blocks_of
from facts.moments.losses import OutputError, kl_divergence
from facts.search import AllocationProblem, Plan
from facts.search.base import Profile
from facts.search.sensitivity.measured import Sensitivity
from facts.utils.options import Count, NotNegative, Positive, Ratio, options

LEAST_LOST = 1e-6  # of a layer's energy at the measured rank


class TemperedDivergence:
    """The KL divergence of logits divided by a temperature."""

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.__qualname__ = f"kl_divergence at {temperature}"

    def __call__(self, original: Tensor, changed: Tensor) -> Tensor:
        return kl_divergence(original / self.temperature, changed / self.temperature)


@options
class ErrorModel:
    """Modelled errors of every layer at multiples of `rank_multiple` between the ratios `least_ratio` and 0.95.

    A rank's error is the divergence at `measured_ratio`, times the energy lost at the rank over that lost there. In a
    language model, errors in block b are multiplied by 1 + γ h(b); h is Σ_{k >= b} (k + 1)^-α, scaled to fall from 1 in
    the first block to 0 in the last. α and γ are drawn `num_trials` times, up to `max_decay` and `max_bias`; the plan
    whose network has the nearest outputs is used. Networks that do not read tokens have no such bias.
    """

    MOST: ClassVar[float] = 0.95

    measured_ratio: Ratio = 0.1
    least_ratio: Ratio = 0.1
    temperature: Positive = 0.6
    rank_multiple: Count = 8
    num_trials: Count = 10
    max_decay: NotNegative = 3.0
    max_bias: NotNegative = 7.0
    seed: int = 0

    def best_plan(self, problem: AllocationProblem, plan_of: Callable[[Profile], Plan]) -> tuple[Plan, Profile]:
        """Make a search's plan from the errors; return it with the errors."""
        errors = self.errors(problem)
        if not reads_tokens(problem.model):
            return plan_of(errors), errors
        blocks, rng = block_numbers(problem), random.Random(self.seed)
        plans: list[Plan] = []
        for _ in range(self.num_trials):
            decay, bias = rng.uniform(0, self.max_decay), rng.uniform(0, self.max_bias)
            weights = block_weights(1 + max(blocks.values()), decay, bias)
            raised: Profile = {
                name: {rank: weights[blocks[name]] * error for rank, error in each.items()}
                for name, each in errors.items()
            }
            if (plan := plan_of(raised)) not in plans:
                plans.append(plan)
        return min(plans, key=lambda plan: self.divergence(problem, plan)), errors

    def errors(self, problem: AllocationProblem) -> Profile:
        tempered = replace(problem.calibration, output_error=self.error(problem))
        at = problem.ranks_of_ratios((self.measured_ratio,))
        measured = Sensitivity(replace(problem, calibration=tempered)).profile(at)
        offered = problem.candidate_ranks(self.rank_multiple, at_least=1, between=(self.least_ratio, self.MOST))
        errors: Profile = {}
        for name, ((rank, divergence),) in ((name, each.items()) for name, each in measured.items()):
            energies = problem.energies(name)
            lost = (1 - energies.cumsum(dim=0) / energies.sum()).clamp(min=0)
            scale = divergence / lost[rank - 1].clamp(min=LEAST_LOST)  # type: ignore[operator]
            errors[name] = {each: (scale * lost[each - 1]).item() for each in offered[name]}
        return errors

    def error(self, problem: AllocationProblem) -> OutputError:
        """The divergence at the temperature, or the problem's own error if its outputs are not logits."""
        own = problem.calibration.output_error
        return TemperedDivergence(self.temperature) if own is kl_divergence else own

    def divergence(self, problem: AllocationProblem, plan: Plan) -> float:
        """The mean divergence of a plan's network on the search's data."""
        network, precision = problem.apply(plan, problem.decompositions), problem.calibration.execution.precision
        found = distance(problem.model, network, problem.sensitivity_batches(), self.error(problem), precision)
        assert found
        return found.mean


def block_numbers(problem: AllocationProblem) -> dict[str, int]:
    """Number each part's block from 0, in the network's order; a part outside all blocks is in the previous one."""
    numbers: dict[nn.Module, int] = {}
    found, last = {}, 0
    for name, part in problem.parts.items():
        layer = problem.model.get_submodule(part.layers(problem.model)[0])
        for block in blocks_of(problem.model, [layer]):  # one at most
            last = numbers.setdefault(block, len(numbers))
        found[name] = last
    return found


def block_weights(num_blocks: int, decay: float, bias: float) -> np.ndarray:
    """Factors `[num_blocks]` of the blocks' errors, from 1 + `bias` to 1; 1 if there is only one block."""
    terms = np.arange(1.0, num_blocks + 1) ** -decay
    sums = terms[::-1].cumsum()[::-1]
    return 1 + bias * (sums - sums[-1]) / max(sums[0] - sums[-1], np.finfo(float).tiny)
