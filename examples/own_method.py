"""A method of your own, an estimator and a search, beside those of the package.

    python examples/own_method.py

The estimator weights each token's inputs by the size of its gradient and leaves the outputs alone: half of what FACTS
does. The search leaves the layers of the first and the last block dense. Neither is known to be good.
"""

import typer
from pydantic.dataclasses import dataclass
from small_networks import small_deit

import facts
from experiments.mini.digits import Digits
from facts.estimators import Estimator, KroneckerFactors
from facts.moments import GradWeightedInputGram
from facts.search import Search, SearchResult


@dataclass(frozen=True, kw_only=True)
class InputSide(Estimator):
    """A = Σ ‖g‖² x xᵀ over tokens, B = I."""

    @property
    def moments(self):
        return (GradWeightedInputGram(),)  # what the data pass collects

    def factors(self, moments):
        (A,) = moments[GradWeightedInputGram()]
        return KroneckerFactors(A=A)


@dataclass(frozen=True, kw_only=True)
class KeepEnds(Search):
    """Dense first and last blocks; the same ratio for all other layers."""

    first: str = "blocks.0."
    last: str = "blocks.5."

    def allocate(self, problem):
        ends = [name for name in problem.layers if name.startswith((self.first, self.last))]
        for ratio in (percent / 100 for percent in range(99, 0, -1)):
            plan = {name: None if name in ends else problem.rank_of_ratio(name, ratio) for name in problem.layers}
            if problem.fits(plan):
                return SearchResult(plan)
        raise ValueError("the first and the last block alone cost more than the budget: allow a larger ratio")


def main(ratio: float = 0.5) -> None:
    model, task = small_deit(), Digits(num_calibration=1024)
    methods = {"estimators": ("svd_llm", InputSide(), "facts"), "searches": ("uniform", KeepEnds())}
    points = facts.pareto(model, task.calibration(model), task.evaluate, **methods, ratios=(ratio,))
    print(points[["estimator", "search", "top1"]].to_string(index=False))


if __name__ == "__main__":
    typer.run(main)
