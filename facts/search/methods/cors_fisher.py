"""CoRS-Fisher: CoRS's integer program with sensitivities from one pass (not in the paper).

Sensitivities are second-order approximations, computed in one forward and backward pass (`profile: exact`) or from the
decomposition alone (`profile: kronecker`).
"""

from typing import Literal

from torch import Tensor

from facts.estimators.base import TAKE_TWO_SIDED, TwoSidedEstimator
from facts.moments.losses import DIVERGENCES
from facts.parts import Part
from facts.search.base import RANGE, AllocationProblem, Profile, SearchResult
from facts.search.sensitivity_fisher import Labels, exact_profiles, kronecker_profile
from facts.search.token_program import MILPSearch
from facts.utils.options import Count, Seed, options

# Profiles cover every rank; the plan is reported with errors at these ratios, for comparison with measured ones.
SHOWN_RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)


@options
class CoRSFisher(MILPSearch):
    """Approximate KL(original ‖ compressed) by ½ vec(ΔW)ᵀ F vec(ΔW) at every multiple of `rank_multiple`.

    Parts with fewer than five such multiples offer those of a half of it, a quarter, and so on.

    `profile: exact` computes F in one forward and backward pass over the sensitivity data, with `labels` drawn from the
    network (`sampled`) or `given` by the data. `profile: kronecker` takes the estimator's A ⊗ B, which costs nothing
    once the decomposition exists, needs an estimator of both sides, and cannot choose tokens.
    """

    rank_multiple: Count = 8
    profile: Literal["kronecker", "exact"] = "exact"
    labels: Labels = "sampled"
    seed: Seed = 0

    @property
    def chooses_tokens(self) -> bool:  # type: ignore[override]
        """Of tokens, A ⊗ B tells the distance, but not what merging them costs."""
        return self.profile == "exact"

    def least(self, part: Part) -> int:
        if part.shortens:
            return part.least
        return min(part.candidates(self.rank_multiple, len(SHOWN_RATIOS), RANGE))

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        profiles = self._profiles(problem)
        offered = _at(profiles, problem.candidate_ranks(self.rank_multiple, at_least=len(SHOWN_RATIOS)))
        plan, solution = self.best_plan(problem, offered)
        shown = _at(profiles, problem.ranks_of_ratios(SHOWN_RATIOS))
        is_divergence = self.labels == "sampled" and problem.prepared.output_error in DIVERGENCES
        predicted = solution.error if is_divergence else None
        return SearchResult(plan, solution, shown, predicted=predicted, offered=offered)

    def _profiles(self, problem: AllocationProblem) -> dict[str, Tensor]:
        if self.profile == "exact":
            return exact_profiles(problem, self.labels, self.seed)
        if not isinstance(problem.estimator, TwoSidedEstimator):
            raise ValueError(
                "profile=kronecker reads a Fisher matrix from the decomposition, and this estimator has none: "
                f"{TAKE_TWO_SIDED} or profile=exact"
            )
        return {name: kronecker_profile(problem, name) for name in problem.parts}


def _at(profiles: dict[str, Tensor], ranks: dict[str, list[int]]) -> Profile:
    return {name: {rank: profiles[name][rank].item() for rank in ranks[name]} for name in ranks}
