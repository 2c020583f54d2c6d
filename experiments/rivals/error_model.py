"""The error model of LEMS: one measured divergence per layer, along the curve of lost energy.

From the published code, `lems-svd/lems` (Thoma et al., ICML 2026), but with our candidate ranks, and without its bias
towards early blocks, which is for language models.
"""

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from facts.moments.losses import kl_divergence
from facts.search import AllocationProblem
from facts.search.base import Profile
from facts.search.sensitivity.measured import Sensitivity
from facts.utils.options import Count, Positive, Ratio, options

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

    A rank's error is the divergence at `measured_ratio`, times the energy lost at the rank over that lost there.
    Outputs that are not logits are compared by their own error.
    """

    MOST: ClassVar[float] = 0.95

    measured_ratio: Ratio = 0.1
    least_ratio: Ratio = 0.1
    temperature: Positive = 0.6
    rank_multiple: Count = 8

    def errors(self, problem: AllocationProblem) -> Profile:
        calibration = problem.calibration
        if calibration.output_error is kl_divergence:
            calibration = replace(calibration, output_error=TemperedDivergence(self.temperature))
        at = problem.ranks_of_ratios((self.measured_ratio,))
        measured = Sensitivity(replace(problem, calibration=calibration)).profile(at)
        offered = problem.candidate_ranks(self.rank_multiple, at_least=1, between=(self.least_ratio, self.MOST))
        errors: Profile = {}
        for name, (rank,) in at.items():
            energies = problem.energies(name)
            lost = (1 - energies.cumsum(dim=0) / energies.sum()).clamp(min=0)
            scale = measured[name][rank] / lost[rank - 1].clamp(min=LEAST_LOST)
            errors[name] = {each: (scale * lost[each - 1]).item() for each in offered[name]}
        return errors
