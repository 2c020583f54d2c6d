"""Blockwise: decompositions from moments of the network whose earlier blocks are compressed (Thoma et al., 2025).

The ranks stay the same; moments, including gradients, are collected again for each block.
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
        alone, network = problem.calibration.cached_in(None), problem.network
        parts = {name: alone.parts[name] for name in names}
        current = replace(alone, model=network, network=network, calls=dict(problem.layers(names)), parts=parts)
        return current.decompositions(problem.estimator)
