"""Allocation problems on a small network, with everything in float64."""

from dataclasses import replace

import torch
from torch import nn

import facts
from facts.calibration.data import Data
from facts.calibration.prepared_model import PreparedModel, decompose_layers
from facts.decomposition.truncation import Decomposition
from facts.estimators import ESTIMATORS, PELA
from facts.modules.forms import FORMS
from facts.moments import LayerMoments
from facts.parts import part_at
from facts.search import AllocationProblem
from tests.networks import image_batches, make_model


def make_problem(estimator="facts", sizes=(4, 3), cache=None, **fields):
    """`EveryShape`, decomposed, with half of its FLOPs allowed; fields of either dataclass."""
    own = {name: fields.pop(name) for name in fields.keys() & PreparedModel.__dataclass_fields__.keys()}
    calibration = facts.prepare(make_model(), image_batches([8, 8]), held_out=(), form="plain")
    if "data" in own:
        own["data"] = Data.of(own["data"], calibration.model)
    fields = {"bounds": {"flops": 0.5}, "sensitivity": image_batches(list(sizes), seed=2), **fields}
    fields["sensitivity"] = Data.of(fields["sensitivity"], calibration.model)
    chosen = ESTIMATORS[estimator]()
    decompositions = calibration.decompositions(chosen)
    calibration = replace(calibration, **own).cached_in(cache)
    return AllocationProblem(prepared=calibration, estimator=chosen, decompositions=decompositions, **fields)


def plain_problem(model, decompositions=None, bounds=None, **fields):
    """All linear layers of a network without data, decomposed by weight alone."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    parts = {name: replace(part_at(model, name, "layers"), rows=1) for name in names}
    calibration = PreparedModel(model, model, parts).in_form(FORMS["plain"]())
    if decompositions is None:
        moments = dict.fromkeys(calibration.linears, LayerMoments({}))
        decompositions = decompose_layers(calibration.linears, calibration.parts, PELA(), moments)
    return AllocationProblem(calibration, PELA(), decompositions, bounds or {"params": 0.5}, **fields)


def every_rank(problem: AllocationProblem) -> dict[str, list[int]]:
    return {name: list(range(1, len(d.energies) + 1)) for name, d in problem.decompositions.items()}


def truncated(problem: AllocationProblem, name: str, rank: int):
    left, right = problem.decompositions[name].truncate(rank)
    return left @ right


def with_energies(energies):
    """A problem of square layers of 20 with these squared singular values, in modules of such names."""
    model = nn.ModuleDict()
    for name in energies:
        owner, _, last = name.partition(".")
        if owner not in model:
            model[owner] = nn.ModuleDict()
        model[owner][last] = nn.Linear(20, 20)
    decompositions = {name: Decomposition(torch.eye(20), torch.eye(20), e.double()) for name, e in energies.items()}
    return plain_problem(model, decompositions)
