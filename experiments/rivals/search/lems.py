"""LEMS: modelled errors and an integer program (Thoma et al., ICML 2026)."""

from experiments.rivals.error_model import ErrorModel
from facts.search import AllocationProblem, SearchResult
from facts.search.base import MILPSearch
from facts.utils.options import options


@options
class LEMSSearch(ErrorModel, MILPSearch):
    """Find the plan with the least modelled error within the budget; layers may stay dense, without error."""

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        errors = self.errors(problem)
        plan, _ = self.solve(problem, errors)
        return SearchResult(plan, profile=errors)
