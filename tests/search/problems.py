"""Allocation problems on a small network, with everything in float64."""

import torch
from torch import nn

import facts
from facts.decomposition.layers import decompose_layers
from facts.decomposition.truncation import Decomposition
from facts.estimators import ESTIMATORS, PELA
from facts.modules.forms import FORMS
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


def losing(losses, ratio=0.5, form="plain"):
    """A problem of square layers of 20 that lose so much at half of their full rank, and at every other below 20."""
    layers = {name: nn.Linear(20, 20) for name in losses}
    energies = {name: torch.tensor([0.0] * 19 + [loss**2], dtype=torch.float64) for name, loss in losses.items()}
    decompositions = {name: Decomposition(torch.eye(20), torch.eye(20), energies[name]) for name in losses}
    model = nn.Sequential(*layers.values())
    return AllocationProblem(model, layers, decompositions, {"params": ratio}, form=FORMS[form])
