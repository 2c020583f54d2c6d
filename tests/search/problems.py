"""Allocation problems on a small network, with everything in float64."""

import facts
from facts.decomposition.layers import decompose_layers
from facts.estimators import ESTIMATORS, PELA
from facts.moments import LayerMoments
from facts.search import AllocationProblem
from facts.utils.cache import Cache
from tests.networks import image_batches, make_model


def make_problem(estimator="facts", sizes=(4, 3), cache=None, **fields) -> AllocationProblem:
    """`EveryShape`, decomposed, with half of its FLOPs allowed."""
    calibration = facts.prepare(make_model(), image_batches([8, 8]))
    defaults = {
        "model": calibration.model,
        "layers": calibration.layers,
        "decompositions": calibration.decompositions(ESTIMATORS[estimator]()),
        "bounds": {"flops": 0.5},
        "rows": calibration.rows,
        "sensitivity": image_batches(list(sizes), seed=2),
        "calibration": calibration.data,
        "cache": cache and Cache(cache),
    }
    return AllocationProblem(**{**defaults, **fields})


def by_weight_alone(layers):
    """Decompositions that need no data."""
    return decompose_layers(layers, PELA(), dict.fromkeys(layers, LayerMoments({})))


def every_rank(problem: AllocationProblem) -> dict[str, list[int]]:
    return {name: list(range(1, len(d.energies) + 1)) for name, d in problem.decompositions.items()}


def truncated(problem: AllocationProblem, name: str, rank: int):
    """A layer's weight at one rank."""
    left, right = problem.decompositions[name].truncate(rank)
    return left @ right
