"""Blockwise: decompositions from moments of the network whose earlier blocks are compressed (Thoma et al., 2025).

The ranks stay; moments, gradients included, are collected again for each block.
"""

from dataclasses import replace

from facts.decomposition.truncation import Decomposition
from facts.refit.base import Refit, RefitProblem
from facts.utils.options import options


@options
class Blockwise(Refit):
    """The estimator's own decomposition of the original weights, in the metric of the compressed network's data."""

    fits_bias = True

    def refitted(self, problem: RefitProblem, names: list[str]) -> dict[str, Decomposition]:
        alone = problem.calibration.cached_in(None)
        current = replace(alone, model=problem.network, layers=problem.layers(names))
        return current.decompositions(problem.estimator)
