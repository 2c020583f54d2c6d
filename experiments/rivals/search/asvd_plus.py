"""ASVD+: ASVD's threshold on modelled errors (a rival in Thoma et al., ICML 2026)."""

from experiments.rivals.error_model import ErrorModel
from facts.search import AllocationProblem, Search, SearchResult
from facts.search.methods.asvd import plan_behind_cut
from facts.utils.options import Ratio, options


@options
class ASVDPlusSearch(ErrorModel, Search):
    """Each layer takes the smallest rank whose modelled error stays under a threshold, or stays dense if none does."""

    least_ratio: Ratio = 0.3

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        errors = self.errors(problem)
        return SearchResult(plan_behind_cut(problem, errors), profile=errors)
