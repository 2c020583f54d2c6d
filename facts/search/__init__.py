"""Searches choose the number of components that each layer keeps; one file per method."""

from facts.search.allocation import Allocation, allocate
from facts.search.base import AllocationProblem, Plan, Search, SearchResult
from facts.search.methods.cors import interpolate_profile
from facts.utils.options import load_methods

SEARCHES = load_methods("facts.search.methods", Search)  # type: ignore[type-abstract]
globals().update((method.__name__, method) for method in SEARCHES.values())  # facts.search.CoRS, and so on

__all__ = [
    "SEARCHES",
    "Allocation",
    "AllocationProblem",
    "Plan",
    "Search",
    "SearchResult",
    "allocate",
    "interpolate_profile",
    *(method.__name__ for method in SEARCHES.values()),
]
