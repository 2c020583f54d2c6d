"""What a search is: from the layers and a budget to a rank plan."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass as plain_dataclass

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import nn

from facts.cost import CostName

Plan = dict[str, int | None]
"""Layer name to rank, or None for a layer left dense."""


@plain_dataclass(frozen=True)
class AllocationProblem:
    """Layers, and the fraction of their `cost` (`flops` or `params`) that may remain."""

    layers: Mapping[str, nn.Linear]
    ratio: float
    cost: CostName


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Search(ABC):
    """A way to spend a budget."""

    @abstractmethod
    def allocate(self, problem: AllocationProblem) -> Plan:
        """A rank for each layer."""


def break_even_rank(d_out: int, d_in: int) -> int:
    """The rank at which two factors cost what the layer costs."""
    return d_out * d_in // (d_out + d_in)


def rank_of_ratio(d_out: int, d_in: int, ratio: float) -> int:
    """The rank whose factors cost at most `ratio` of the layer, but at least 1 (paper, section 5.1)."""
    return max(1, int(break_even_rank(d_out, d_in) * ratio))
