"""Elastic folders: a dense network with its decompositions and errors, from which a network is cut for any budget.

Cutting is the integer program and the decompositions, without any data.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from facts.calibration.outputs import ENOUGH, Distance
from facts.calibration.prepared_model import Execution, PreparedModel
from facts.cost.count import count_flops
from facts.decomposition.truncation import Decomposition
from facts.estimators.methods.pela import PELA
from facts.models.weights import sha256
from facts.modules.forms import FORMS
from facts.modules.networks import type_of, without_autocast
from facts.parts import kinds_of, linked, part_at, rewritten, with_convolutions
from facts.parts.base import INTEGERS, Description
from facts.result import CompressionResult, Summary, count_costs
from facts.saving.manifest import DECOMPOSITIONS, ELASTIC, MOST_SECONDS, Elastic, Manifest
from facts.saving.save import save_compressed, target_folder, write_card
from facts.saving.structure import read_header, refuse_unsavable
from facts.search.base import AllocationProblem, Profile
from facts.search.budget import Budget
from facts.search.methods.cors import CoRS
from facts.search.methods.cors_fisher import CoRSFisher
from facts.search.token_program import MILPSearch
from facts.utils.files import replacing

log = logging.getLogger(__name__)

SHOWN = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)  # ratios of the model card's curve
NUM_TURNS = 3  # of a measurement of latency
MOST_INPUTS = 2**24  # values of one sample
OF_ALL_BUDGETS = ("estimator", "search", "parts", "widths", "tokens")  # fields of a summary
# Errors of files that do not fit.
UNFIT = (AssertionError, AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError)


def save_elastic(result: CompressionResult, folder: Path | str) -> None:
    """Write a folder from which `facts.load_compressed(folder, ratio=0.6)` cuts a network for any budget.

    For a ratio, FLOPs and parameters, a cut equals what `facts.compress` makes of the same data, bit by bit if both run
    on the same CPU. With tokens, of which `facts.compress` compares several plans on the data, a cut
    has the plan of the least predicted error. Without a budget, the folder loads as the dense network. Moments and
    errors are computed again unless the result was made with a cache. Raises `ValueError` for a result that was loaded
    or recovered, and for a search without an integer program.
    """
    if not isinstance(result, CompressionResult) or result.problem is None or result.summary.recovery:
        raise ValueError("save_elastic needs a result of facts.compress that is not recovered")
    problem, search = result.problem, result.search
    if not isinstance(search, CoRS | CoRSFisher):
        raise ValueError(f"{type(search).__name__} gives no errors for other budgets: take search=cors_fisher or cors")
    prepared, folder = problem.prepared, target_folder(Path(folder))
    refuse_unsavable(prepared.model)
    with without_autocast(problem.device):
        decompositions = prepared.decompositions(problem.estimator)
        problem = replace(problem, decompositions=decompositions, bounds={"flops": SHOWN[0]}, latency=None)
        found = search.allocate(problem)
        problem = replace(problem, sensitivity=None)  # a cut has no data either
    curve = tuple(_curve(problem, search, found.offered)) if found.predicted is not None else ()
    plan, made = dict.fromkeys(prepared.parts), result.summary
    summary = Summary(
        **count_costs(replace(problem, bounds={}), plan, prepared.model, made.sizes[0]),
        **{name: getattr(made, name) for name in OF_ALL_BUDGETS},
        repaired={name: each.num_repaired for name, each in decompositions.items() if each.num_repaired},
    )
    dense = replace(result, model=prepared.apply(plan, {}), plan=plan, summary=summary)
    save_compressed(dense, folder)
    tensors = {
        f"{name}/{field}": tensor.cpu().contiguous()
        for name, decomposition in decompositions.items()
        for field, tensor in prepared.part_of[name].stored(decomposition).items()
    }
    with replacing(folder / DECOMPOSITIONS) as path:
        save_file(tensors, str(path))
        checksum = sha256(path)
    example, parts = prepared.example, prepared.parts
    content = Elastic(
        parts=prepared.kinds,
        form=prepared.form.name,
        precision=str(prepared.execution.precision).removeprefix("torch."),  # type: ignore[arg-type]
        time_limit=min(search.time_limit, MOST_SECONDS),
        input_shape=tuple(example.shape) if isinstance(example, Tensor) else None,
        reads_integers=isinstance(example, Tensor) and not example.is_floating_point(),
        rows={part.layers[-1]: part.rows for part in parts.values() if part.layers},
        described={name: Description.of(part) for name, part in parts.items() if part.shortens},
        errors={name: tuple(errors.items()) for name, errors in found.offered.items()},
        curve=curve,
        weights=Manifest.read(folder).fingerprint,
        decompositions=checksum,
        information=far.mean / far.share if (far := result.summary.distance) and far.share else None,
    )
    with replacing(folder / ELASTIC) as path:
        path.write_text(content.text(), encoding="utf-8")
    write_card(folder, folder.resolve().name)


def _curve(problem: AllocationProblem, search: MILPSearch, offered: Profile) -> Iterator[tuple[float, float]]:
    """Predicted distances at the ratios that the ranks on offer can meet."""
    for ratio in SHOWN:
        with suppress(ValueError):
            yield ratio, search.best_plan(replace(problem, bounds={"flops": ratio}), offered)[1].error


def cut(dense: CompressionResult, fingerprint: str, folder: Path, budget: Budget) -> CompressionResult:
    """Cut the dense network of an elastic folder, whose weight file has this `fingerprint`, to a budget.

    Raises `FileNotFoundError` for another folder, `ValueError` for a damaged one and for a budget that cannot be met.
    """
    content = Elastic.read(folder)
    if content.weights != fingerprint:
        raise ValueError(f"{folder / ELASTIC} belongs to other weights: save or fetch the folder again")
    problem = _problem(dense, folder, content)
    prepared = problem.prepared
    if "latency" in budget.costs:
        if content.input_shape is None:
            raise ValueError("latency needs one input tensor of a known shape: bound flops or params")
        prepared = replace(prepared, first_inputs=torch.zeros_like(prepared.example, device=problem.device))
    table = prepared.latency_table(NUM_TURNS)
    problem = replace(problem, bounds=budget.bounds(prepared, table), latency=table)
    plan, solution = dict.fromkeys(problem.parts), None
    if not problem.fits(plan):
        errors = {name: dict(pairs) for name, pairs in content.errors.items()}
        least = {name: min(filter(None, ranks), default=None) for name, ranks in errors.items()}
        problem.refuse_too_small(least, "the folder")
        search = CoRSFisher(time_limit=content.time_limit)
        plan, solution = search.best_plan(problem, errors)
    with without_autocast(problem.device):
        model = prepared.apply(plan, problem.decompositions)
    latency = {}
    if share := problem.bounds.get("latency"):
        latency = {"dense": table.dense, "allowed": share * table.dense, "predicted": table.predicted(plan)}
    predicted = solution.error if solution and content.curve else None
    if predicted and content.information:
        share = predicted / content.information
        if Distance(predicted, share, ENOUGH).is_too_far:
            lost = f"{min(1, share):.0%} of the original's information"
            log.warning("this cut is predicted to lose %s: allow more, or recover it with `facts recover`", lost)
    form = content.form if prepared.single_layers else "plain"
    costs = count_costs(problem, plan, model, dense.summary.sizes[0])
    dense = dense.with_summary(**costs, latency=latency, form=form, predicted=predicted)
    return replace(dense, model=model.eval(), plan=plan)


def _problem(dense: CompressionResult, folder: Path, content: Elastic) -> AllocationProblem:
    """Rebuild the problem of the dense network. Raises `ValueError` if the files do not fit it."""
    path = folder / DECOMPOSITIONS
    header, found = read_header(path), load_file(path)
    if sha256(path) != content.decompositions:
        raise ValueError(f"{path} is not the file that {ELASTIC} describes (different SHA-256): save or fetch it again")
    try:
        prepared = _prepared(dense, content)
        for name, part in prepared.parts.items():
            if max((rank or 1 for rank, _ in content.errors[name]), default=math.inf) > part.largest:
                raise ValueError(f"{name} cannot have these ranks")
        _refuse_other_shapes(prepared, header)
        device = next(dense.model.parameters()).device
        tensors = {key: tensor.to(device) for key, tensor in found.items()}
        decompositions = {name: _restored(prepared, name, tensors) for name in prepared.linears}
    except UNFIT as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder / ELASTIC} does not fit its network: {reason}; save or fetch it again") from error
    return AllocationProblem(prepared, PELA(), decompositions, {})  # no estimator is needed


def _prepared(dense: CompressionResult, content: Elastic) -> PreparedModel:
    model, form = with_convolutions(dense.model, content.parts, content.errors), FORMS[content.form]
    precision, example = getattr(torch, content.precision), None
    found = []
    for name in content.errors:
        part = part_at(model, name, content.parts, content.described)
        if part is None:
            raise ValueError(f"{name} is no part to compress")
        found.append(part.with_rows(content.rows).in_form(form(precision)))
    parts = {part.name: part for part in linked(model, found, kinds_of(content.parts), {})}
    if content.input_shape is not None:
        dtype = torch.int64 if content.reads_integers else type_of(model)
        example = torch.empty(content.input_shape, dtype=dtype, device="meta")
        if example.numel() > MOST_INPUTS:
            raise ValueError(f"a sample of the shape {content.input_shape} is too large")
        count_flops(model, example, "paper")  # which fails if the network does not take it
    return PreparedModel(
        model=model,
        rewritten=rewritten(model, parts),
        parts=parts,
        kinds=content.parts,
        form=form(precision),
        execution=Execution(precision=precision),
        flops=dense.summary.before.flops,
        example=example,
    )


def _refuse_other_shapes(prepared: PreparedModel, header: Mapping[str, Tensor]) -> None:
    """Raise `ValueError`, before any tensor is read, if names and shapes do not follow from the network."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, linear in prepared.linears.items():
        shapes = prepared.part_of[name].stored_shapes(linear)
        if f"{name}/mean" in header:
            shapes["mean"] = (linear.in_features,)
        expected |= {f"{name}/{field}": shape for field, shape in shapes.items()}
    found = {key: tuple(tensor.shape) for key, tensor in header.items()}
    for key in sorted(found.keys() | expected.keys()):
        if found.get(key) != expected.get(key):
            raise ValueError(f"{key} has the shape {found.get(key)} instead of {expected.get(key)}")
        types = {torch.int64} if key.rpartition("/")[-1] in INTEGERS else {torch.float32, torch.float64}
        if header[key].dtype not in types:
            raise ValueError(f"{key} holds {header[key].dtype}")


def _restored(prepared: PreparedModel, name: str, tensors: Mapping[str, Tensor]) -> Decomposition:
    """The decomposition of a linear from stored tensors. Raises `ValueError` for values that it cannot have."""
    fields = {key.rpartition("/")[-1]: each for key, each in tensors.items() if key.rpartition("/")[0] == name}
    if not all(tensor.isfinite().all() for tensor in fields.values()):
        raise ValueError(f"{name} holds NaN or infinity")
    return prepared.part_of[name].restored(prepared.linears[name], fields)
