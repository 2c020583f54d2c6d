"""Structured pruning: methods that the paper compares with, one file each."""

from facts.pruning.base import Pruner, PruningProblem
from facts.utils.options import Methods

PRUNERS = Methods("facts.pruning.methods", Pruner)  # type: ignore[type-abstract]

__all__ = ["PRUNERS", "Pruner", "PruningProblem"]


def __getattr__(name: str) -> type[Pruner]:
    """Find a method by its class, as in `facts.pruning.NViT`."""
    return PRUNERS.of_class(name)
