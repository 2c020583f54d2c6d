"""Cut of a network from an elastic folder: the integer program and the decompositions without any data."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from facts.calibration.execution import Execution
from facts.calibration.prepare import Calibration
from facts.calibration.selection import Selection
from facts.calibration.units import parts_of, with_units
from facts.cost.count import Size, count_flops
from facts.decomposition.parts import HiddenUnit
from facts.estimators.methods.pela import PELA
from facts.models.weights import sha256
from facts.modules.forms import FORMS
from facts.modules.linear_calls import with_linear_layers
from facts.modules.lowrank import LowRankLayer
from facts.modules.modes import without_autocast
from facts.modules.pointwise import is_pointwise
from facts.result import CompressionResult
from facts.saving.elastic import DECOMPOSITIONS, ELASTIC, Elastic, restored
from facts.saving.manifest import Manifest
from facts.saving.structure import read_header
from facts.search.budget import Budget
from facts.search.methods.cors_fisher import CoRSFisher
from facts.search.problem import AllocationProblem

NUM_TURNS = 3  # of a measurement of latency
INTEGERS = ("/order", "/num_repaired")
MOST_INPUTS = 2**24  # values of one sample
# Errors of files that do not fit.
UNFIT = (AssertionError, AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError)


def cut(dense: CompressionResult, folder: Path, budget: Budget) -> CompressionResult:
    """Cut the dense network of an elastic folder to a budget.

    Raises `FileNotFoundError` for another folder, `ValueError` for a damaged one and for a budget that cannot be met.
    """
    content = Elastic.read(folder)
    problem = _problem(dense, folder, content)
    calibration, form = problem.calibration, problem.form
    if budget.bounds_latency and content.input_shape is None:
        raise ValueError(
            "latency is measured on one input tensor, whose shape is not known here: bound flops or params"
        )
    if budget.bounds_latency:
        calibration = replace(calibration, first_inputs=torch.zeros_like(calibration.example, device=problem.device))
    table = calibration.latency_table(NUM_TURNS, form)
    problem = replace(problem, bounds=budget.bounds(calibration, table), latency=table)
    plan, solution = dict.fromkeys(problem.parts), None
    if not problem.fits(plan):
        errors = {name: dict(pairs) for name, pairs in content.errors.items()}
        search = CoRSFisher(time_limit=content.time_limit)
        plan, solution = search.solve(problem, errors)
    with without_autocast(problem.device):
        model = problem.apply(plan, problem.decompositions)
    latency = {}
    if share := problem.bounds.get("latency"):
        latency = {"dense": table.dense, "allowed": share * table.dense, "predicted": table.predicted(plan)}
    full, example = dense.summary.full_flops, calibration.example
    full = (full[0], count_flops(model, example, "full")) if full and example is not None else None
    summary = replace(
        dense.summary,
        after=calibration.cost_after(model, plan, form),
        sizes=(Size.of(dense.model), Size.of(model)),
        form=content.form if plan.keys() - calibration.units.keys() else "plain",
        bounds=dict(problem.bounds),
        spent=dict(zip(problem.bounds, problem.spent(plan), strict=True)),
        budget=dict(zip(problem.bounds, problem.budget, strict=True)),
        predicted=solution.error if solution and content.curve else None,
        full_flops=full,
        latency=latency,
    )
    return replace(dense, model=model.eval(), plan=plan, summary=summary)


def _problem(dense: CompressionResult, folder: Path, content: Elastic) -> AllocationProblem:
    """Rebuild the problem of the dense network. Raises `ValueError` if the files do not fit it."""
    path = folder / DECOMPOSITIONS
    if Manifest.read(folder).fingerprint != content.weights:
        raise ValueError(f"{folder / ELASTIC} belongs to other weights: save or fetch the folder again")
    header = read_header(path)
    if sha256(path) != content.decompositions:
        raise ValueError(f"{path} is not the file that {ELASTIC} describes (different SHA-256): save or fetch it again")
    try:
        calibration = _calibration(dense, content)
        if content.errors.keys() != calibration.parts.keys():
            raise ValueError("errors of other parts")
        for name, part in calibration.parts.items():
            if max((rank or 1 for rank, _ in content.errors[name]), default=math.inf) > part.largest():
                raise ValueError(f"{name} cannot have these ranks")
        _refuse_other_shapes(calibration, header)
        tensors = load_file(path)
        decompositions = {
            name: restored(name, layer, calibration.part_of[name], tensors) for name, layer in calibration.calls.items()
        }
    except UNFIT as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder / ELASTIC} does not fit its network: {reason}; save or fetch it again") from error
    return AllocationProblem(calibration, PELA(), decompositions, {}, FORMS[content.form])  # no estimator is needed


def _calibration(dense: CompressionResult, content: Elastic) -> Calibration:
    modules = dict(dense.model.named_modules())
    inner = [name.removesuffix(".linear") for name in content.rows if name.endswith(".linear")]
    model = with_linear_layers(dense.model, [name for name in inner if name in modules and is_pointwise(modules[name])])
    layers: dict[str, nn.Linear] = {}
    for name in content.rows:
        layer = model.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"{name} is not a linear layer")
        layers[name] = layer
    selection = Selection(model, layers, content.rows, {}, dense.summary.before.flops)
    is_units = content.parts == "units"
    found = with_units(selection, content.kinds) if is_units else parts_of(selection, "layers", None)
    example = None
    if content.input_shape is not None:
        dtype = torch.int64 if content.reads_integers else next(model.parameters()).dtype
        example = torch.empty(content.input_shape, dtype=dtype, device="meta")
        if example.numel() > MOST_INPUTS:
            raise ValueError(f"a sample of the shape {content.input_shape} is too large")
        count_flops(model, example, "paper")  # which fails if the network does not take it
    return Calibration(
        model=model,
        network=found.network,
        calls=found.calls,
        parts=found.parts,
        execution=Execution(precision=getattr(torch, content.precision)),
        flops=selection.flops,
        example=example,
        fit_bias=content.fit_bias,
    )


def _refuse_other_shapes(calibration: Calibration, header: Mapping[str, Tensor]) -> None:
    """Raise `ValueError`, before any tensor is read, if names and shapes do not follow from the network."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, layer in calibration.calls.items():
        part = calibration.part_of[name]
        rank, shapes = part.largest(), {"num_repaired": (), "energies": (part.largest(),)}
        if isinstance(part, HiddenUnit):
            shapes |= {"right": (rank * (rank - 1) // 2,), "order": (rank,)}
        else:
            factor = layer.factors()[0] if isinstance(layer, LowRankLayer) else layer.weight
            shapes |= {"left": (*factor.shape[:-1], rank), "right": (rank, layer.in_features)}
        if f"{name}/mean" in header:
            shapes["mean"] = (layer.in_features,)
        expected |= {f"{name}/{field}": shape for field, shape in shapes.items()}
    found = {key: tuple(tensor.shape) for key, tensor in header.items()}
    for key in sorted(found.keys() | expected.keys()):
        if found.get(key) != expected.get(key):
            raise ValueError(f"{key} has the shape {found.get(key)} instead of {expected.get(key)}")
        types = {torch.int64} if key.endswith(INTEGERS) else {torch.float32, torch.float64}
        if header[key].dtype not in types:
            raise ValueError(f"{key} holds {header[key].dtype}")
