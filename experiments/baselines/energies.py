"""Ranks from curves of the energy that layers lose: LEMS and FastLRD."""

from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from facts.moments.losses import kl_divergence
from facts.moments.statistics import at_least_tiny
from facts.search import AllocationProblem, Plan, Search, SearchResult
from facts.search.base import Profile
from facts.search.sensitivity_measured import Sensitivity
from facts.search.token_program import MILPSearch
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
class LEMSSearch(MILPSearch):
    """LEMS (Thoma et al., ICML 2026): the plan with the least modelled error within the budget.

    Layers may stay dense, without error, or take multiples of `rank_multiple` between the ratios `least_ratio` and
    0.95. A rank's error is the divergence at `measured_ratio`, times the energy lost at the rank over that lost there.
    Outputs that are not logits are compared by their own error.

    From the published code, `lems-svd/lems`, but with our candidate ranks, and without its bias towards early blocks,
    which is for language models.
    """

    MOST: ClassVar[float] = 0.95

    measured_ratio: Ratio = 0.1
    least_ratio: Ratio = 0.1
    temperature: Positive = 0.6
    rank_multiple: Count = 8

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        errors = self.errors(problem)
        return SearchResult(self.best_plan(problem, errors)[0], profile=errors)

    def errors(self, problem: AllocationProblem) -> Profile:
        prepared = problem.prepared
        if prepared.output_error is kl_divergence:
            prepared = replace(prepared, output_error=TemperedDivergence(self.temperature))
        at = problem.ranks_of_ratios((self.measured_ratio,))
        measured = Sensitivity(replace(problem, prepared=prepared)).profile(at)
        offered = problem.candidate_ranks(self.rank_multiple, at_least=1, between=(self.least_ratio, self.MOST))
        errors: Profile = {}
        for name, (rank,) in at.items():
            energies = problem.energies(name)
            lost = (1 - energies.cumsum(dim=0) / energies.sum()).clamp(min=0)
            scale = measured[name][rank] / lost[rank - 1].clamp(min=LEAST_LOST)
            errors[name] = {each: (scale * lost[each - 1]).item() for each in offered[name]}
        return errors


@options
class FastLRDSearch(Search):
    """FastLRD (Luo et al., ISCAS 2024; our reading): components are removed one by one until the budget is met.

    It starts from ranks that cost as much as dense. The next is the one whose removal lowers the cosine similarity of a
    layer's weight and its approximation least per unit of cost, in the estimator's metric; `pela` has the published
    metric. Each layer keeps at least one component.
    """

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        full = {name: problem.full_rank(name) for name in problem.layers}
        falls = []
        for name, rank in full.items():
            kept = problem.decompositions[name].energies.cumsum(dim=0)
            # Cosine similarity of the weight and its approximation at the ranks 0 .. k: the root of the energy kept.
            similarities = [0.0, *(kept / at_least_tiny(kept[-1])).sqrt().tolist()]
            cost = problem.share(name, rank) / rank
            falls += [((similarities[k] - similarities[k - 1]) / cost, -k, name) for k in range(2, rank + 1)]
        falls.sort()  # a layer's own falls rise from its last component to its first

        def plan(number: int) -> Plan:
            removed = Counter(name for _, _, name in falls[:number])
            return {name: rank - removed[name] for name, rank in full.items()}

        return SearchResult(plan(bisect_left(range(len(falls)), True, key=lambda number: problem.fits(plan(number)))))
