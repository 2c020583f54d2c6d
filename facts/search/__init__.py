"""Searches choose the number of components that each layer keeps; one file per method."""

from facts.search.base import AllocationProblem, Plan, Search, SearchResult
from facts.search.integer_program import Allocation, allocate
from facts.search.methods.cors import interpolate_profile
from facts.utils.options import Methods

SEARCHES = Methods("facts.search.methods", Search)  # type: ignore[type-abstract]

__all__ = [
    "SEARCHES",
    "Allocation",
    "AllocationProblem",
    "Plan",
    "Search",
    "SearchResult",
    "allocate",
    "interpolate_profile",
]


def __getattr__(name: str) -> type[Search]:
    """Find a method by its class, as in `facts.search.CoRS`."""
    return SEARCHES.of_class(name)
