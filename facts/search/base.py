"""Searches: from the layers and a budget to a rank plan."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import Field

from facts.decomposition.truncation import Decomposition
from facts.parts.base import Plan
from facts.search.allocation import Allocation, allocate
from facts.search.problem import AllocationProblem
from facts.utils.options import Positive, Ratio, options

Profile = dict[str, dict[int | None, float]]
"""Error of each layer, by name, at each rank; the dense layer (None) has error 0 unless it is listed."""

Ratios = Annotated[tuple[Ratio, ...], Field(min_length=1)]


@dataclass(frozen=True)
class SearchResult:
    """A rank plan, the solver's answer if there is one, and the sensitivity profile that the plan is based on.

    `predicted` is the mean error of the outputs that the search predicts, if it predicts one. If the search also trains
    weights, its `decompositions` replace those of the problem. `offered` holds the errors at all ranks that an integer
    program chose from; at another budget it chooses from the same ones.
    """

    plan: Plan
    solution: Allocation | None = None
    profile: Profile = field(default_factory=dict)
    predicted: float | None = None
    decompositions: Mapping[str, Decomposition] | None = None
    offered: Profile = field(default_factory=dict)


@options
class Search(ABC):
    """A method that chooses ranks within a budget; by default it compares outputs on `num_samples` samples."""

    num_samples: ClassVar[int] = 512

    @abstractmethod
    def allocate(self, problem: AllocationProblem) -> SearchResult:
        """Choose a rank for each layer. The budget is below the dense cost; `compress` handles larger budgets."""


@options
class MILPSearch(Search):
    """If no choice is proved optimal within `time_limit` seconds, the best one found is taken."""

    time_limit: Positive = 60.0

    def solve(self, problem: AllocationProblem, errors: Profile) -> tuple[Plan, Allocation]:
        """Find the plan with the least total error within the budget; dense layers have their error at None, or 0."""
        choices = {name: list(dict.fromkeys([*ranks, None])) for name, ranks in errors.items()}
        profiles = {
            name: [(problem.cost(name, rank), errors[name].get(rank, 0.0)) for rank in ranks]
            for name, ranks in choices.items()
        }
        solution = allocate(profiles, problem.budget, time_limit=self.time_limit)
        return {name: choices[name][index] for name, index in solution.choices.items()}, solution
