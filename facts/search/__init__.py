"""How many components each layer keeps."""

from facts.search.base import AllocationProblem, Plan, Search
from facts.search.uniform import Uniform

SEARCHES: dict[str, type[Search]] = {"uniform": Uniform}

__all__ = ["SEARCHES", "AllocationProblem", "Plan", "Search", "Uniform"]
