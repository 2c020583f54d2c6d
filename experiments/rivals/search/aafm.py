"""AAFM: greedy steps with the least rise in measured divergence per cost (Yu and Wu, AAAI 2023)."""

from collections.abc import Iterator

from facts.search import AllocationProblem, Plan, Search, SearchResult
from facts.search.base import Ratios
from facts.search.sensitivity.measured import Sensitivity
from facts.utils.options import options


@options
class AAFMSearch(Search):
    """Starting from the dense network, layers step down the `ratios` one by one until the budget is met.

    The next step is for the layer whose error, measured with only this layer compressed, rises least per cost saved. If
    even the smallest ratios cost too much, they are the plan.
    """

    ratios: Ratios = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        profile = Sensitivity(problem).profile(problem.ranks_of_ratios(self.ratios))
        steps = {name: list(_steps(problem, name, errors)) for name, errors in profile.items()}
        plan: Plan = dict.fromkeys(problem.layers)
        while not problem.fits(plan) and (waiting := [name for name in steps if steps[name]]):
            name = min(waiting, key=lambda name: steps[name][0][0])
            _, plan[name] = steps[name].pop(0)
        return SearchResult(plan, profile=profile)


def _steps(
    problem: AllocationProblem, name: str, errors: dict[int | None, float]
) -> Iterator[tuple[float, int | None]]:
    """Yield a layer's steps from dense to its smallest rank: the rise in error per cost saved, and the rank."""
    last: int | None = None
    last_error = 0.0
    for rank, error in reversed(errors.items()):
        saved = problem.share(name, last) - problem.share(name, rank)
        if saved > 0:
            yield (error - last_error) / saved, rank
            last, last_error = rank, error
