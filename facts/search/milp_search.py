"""Searches that compute the error of every choice and leave the choice to a solver."""

from facts.decomposition.apply import Plan
from facts.search.allocation import Allocation, Solver, allocate
from facts.search.base import Profile, Search
from facts.search.problem import AllocationProblem
from facts.utils.options import Positive, options


@options
class MILPSearch(Search):
    """If the `solver` proves no choice optimal within `time_limit` seconds, the best one found is taken."""

    solver: Solver = "cbc"
    time_limit: Positive = 60.0

    def solve(self, problem: AllocationProblem, errors: Profile) -> tuple[Plan, Allocation]:
        """Find the plan of least total error within the budget.

        A layer may also stay dense, at the error `errors[None]` or 0.
        """
        choices = {name: list(dict.fromkeys([*ranks, None])) for name, ranks in errors.items()}
        profiles = {
            name: [(problem.cost(name, rank), errors[name].get(rank, 0.0)) for rank in ranks]
            for name, ranks in choices.items()
        }
        solution = allocate(profiles, problem.budget, solver=self.solver, time_limit=self.time_limit)
        return {name: choices[name][index] for name, index in solution.choices.items()}, solution
