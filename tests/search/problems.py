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


def make_problem(estimator="facts", sizes=(4, 3), cache=None, model=None, shape=(3, 8, 8), **fields):
    """`EveryShape` or another network, decomposed, with half of its FLOPs allowed; fields of either dataclass."""
    own = {name: fields.pop(name) for name in fields.keys() & PreparedModel.__dataclass_fields__.keys()}
    calibration = facts.prepare(model or make_model(), image_batches([8, 8], shape=shape), held_out=(), form="plain")
    if "data" in own:
        own["data"] = Data.of(own["data"], calibration.model)
    fields = {"bounds": {"flops": 0.5}, "sensitivity": image_batches(list(sizes), shape=shape, seed=2), **fields}
    if fields["sensitivity"] is not None:
        fields["sensitivity"] = Data.of(fields["sensitivity"], calibration.model)
    chosen = ESTIMATORS[estimator]()
    decompositions = calibration.decompositions(chosen)
    calibration = replace(calibration, **own).cached_in(cache)
    return AllocationProblem(prepared=calibration, estimator=chosen, decompositions=decompositions, **fields)


def plain_problem(model, decompositions=None, bounds=None, rows=None, form="plain", **fields):
    """All linear layers of a network without data, decomposed by weight alone."""
    calibration = uncalibrated(model, rows or {}, form)
    if decompositions is None:
        moments = dict.fromkeys(calibration.linears, LayerMoments({}))
        decompositions = decompose_layers(calibration.linears, calibration.parts, PELA(), moments)
    return AllocationProblem(calibration, PELA(), decompositions, bounds or {"params": 0.5}, **fields)


def uncalibrated(model, rows, form="plain"):
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    parts = {name: replace(part_at(model, name, "layers"), rows=rows.get(name, 1)) for name in names}
    return PreparedModel(model, model, parts).in_form(FORMS[form]())


def every_rank(problem: AllocationProblem) -> dict[str, list[int]]:
    return {name: list(range(1, len(d.energies) + 1)) for name, d in problem.decompositions.items()}


def truncated(problem: AllocationProblem, name: str, rank: int):
    left, right = problem.decompositions[name].truncate(rank)
    return left @ right


def losing(losses, ratio=0.5, form="plain"):
    """A problem of square layers of 20 that lose so much at half of their full rank, and at every other below 20."""
    model = nn.Module()
    for name in losses:
        *owners, last = name.split(".")
        holder = model
        for owner in owners:
            if not hasattr(holder, owner):
                holder.add_module(owner, nn.Module())
            holder = getattr(holder, owner)
        holder.add_module(last, nn.Linear(20, 20))
    energies = {name: torch.tensor([0.0] * 19 + [loss**2], dtype=torch.float64) for name, loss in losses.items()}
    decompositions = {name: Decomposition(torch.eye(20), torch.eye(20), energies[name]) for name in losses}
    return AllocationProblem(uncalibrated(model, {}, form), PELA(), decompositions, {"params": ratio})
