"""Structured pruning: the methods that the paper compares with, one file each."""

from facts.pruning.base import Pruner, PruningProblem
from facts.pruning.disp import DISP
from facts.pruning.isomorphic import Isomorphic
from facts.pruning.nvit import NViT

PRUNERS: dict[str, type[Pruner]] = {
    "isomorphic": Isomorphic,
    "disp_llm": DISP,
    "nvit": NViT,
}

__all__ = ["PRUNERS", "Pruner", "PruningProblem", *(cls.__name__ for cls in PRUNERS.values())]
