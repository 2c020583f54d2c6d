"""Refits: low-rank layers fitted to the outputs of the compressed layers before them, one file per method."""

from facts.refit.base import Refit, RefitProblem
from facts.utils.registry import load_methods

REFITS = load_methods("facts.refit.methods", Refit)  # type: ignore[type-abstract]
globals().update((method.__name__, method) for method in REFITS.values())  # facts.refit.MPIFA, and so on

__all__ = ["REFITS", "Refit", "RefitProblem", *(method.__name__ for method in REFITS.values())]
