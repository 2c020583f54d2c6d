"""Structured pruning: methods that the paper compares with, one file each."""

from facts.pruning.base import Pruner, PruningProblem
from facts.utils.options import load_methods

PRUNERS = load_methods("facts.pruning.methods", Pruner)  # type: ignore[type-abstract]
globals().update((method.__name__, method) for method in PRUNERS.values())  # facts.pruning.NViT, and so on

__all__ = ["PRUNERS", "Pruner", "PruningProblem", *(method.__name__ for method in PRUNERS.values())]
