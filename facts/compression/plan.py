"""From a prepared network to a compressed one: decompose, search for a plan of ranks, apply it, summarise."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from facts.calibration.data import Data
from facts.calibration.prepared_model import PreparedModel
from facts.cost.timing import TimingPolicy
from facts.decomposition.truncation import Decomposition
from facts.estimators import Estimator
from facts.estimators.base import TAKE_TWO_SIDED, TwoSidedEstimator
from facts.modules.forms import relative_error
from facts.modules.lowrank import LowRankLayer
from facts.modules.networks import without_autocast
from facts.parts import Part, Plan
from facts.result import CompressionResult, Summary, count_costs
from facts.search import AllocationProblem, Search, SearchResult
from facts.search.budget import Budget
from facts.search.methods.uniform import Uniform
from facts.utils.progress import stage, stopwatch

log = logging.getLogger(__name__)

FLOPS_TOLERANCE = 0.02  # of the FLOPs of a plan: more is no rounding
LATENCY_TOLERANCE = 0.02  # of a predicted latency: less than the error of a measurement
MAX_CORRECTIONS = 2


def compress_prepared(
    prepared: PreparedModel,
    estimator: Estimator,
    search: Search,
    budget: Budget,
    sensitivity: Iterable[Any] | None = None,
) -> CompressionResult:
    """Compress a prepared network: decompose, allocate, apply, summarise."""
    with stopwatch() as seconds, without_autocast(prepared.device):  # which would round the numbers that decide
        problem = checked_problem(prepared, estimator, search, budget, sensitivity)
        decomposed = replace(problem, decompositions=prepared.decompositions(problem.estimator))
        with stage("search"):
            allocated = allocate_ranks(decomposed, search, prepared.execution.timing)
        summary = summarise(problem, search, allocated, seconds)
    _refuse_hidden_costs(problem, allocated.result.plan, summary)
    return CompressionResult(
        allocated.model,
        allocated.result.plan,
        summary,
        prepared.skipped,
        prepared.model,
        prepared.output_error,
        prepared.held_out,
        problem,
        search,
    )


def checked_problem(
    prepared: PreparedModel,
    estimator: Estimator,
    search: Search,
    budget: Budget,
    sensitivity: Iterable[Any] | None = None,
) -> AllocationProblem:
    """The problem of a prepared network, without decompositions. Raises `ValueError` if the search cannot solve it."""
    few = prepared.data and prepared.data.few_samples(search.num_samples)
    if sensitivity is not None:
        few = Data.of(sensitivity, prepared.model, "sensitivity")
    table = prepared.latency_table(prepared.execution.timing.num_turns)
    bounds = budget.bounds(prepared, table)
    estimator = prepared.resolve_defaults(estimator)
    parts = {name: part.weighed_by(estimator) for name, part in prepared.parts.items()}
    if parts != prepared.parts:
        prepared = replace(prepared, parts=parts)
    problem = AllocationProblem(prepared, estimator, {}, bounds, latency=table, sensitivity=few)
    _refuse_unfit_for_tokens(problem, search)
    least = {name: rank if (rank := search.least(p)) <= p.full_rank else None for name, p in problem.parts.items()}
    problem.refuse_too_small(least, type(search).__name__)
    return problem


@dataclass(frozen=True)
class AllocatedNetwork:
    """A search's result and the network of its plan, made from `decompositions`.

    If latency is bounded, `latency` holds seconds per batch as in `Summary`.
    """

    result: SearchResult
    model: nn.Module
    decompositions: Mapping[str, Decomposition]
    latency: dict[str, float] = field(default_factory=dict)


def allocate_ranks(problem: AllocationProblem, search: Search, timing: TimingPolicy) -> AllocatedNetwork:
    """Search for ranks and apply them; repeat with corrected times if the network's latency was predicted wrongly."""
    num_corrections = 0
    while True:
        result = search_plan(problem, search)
        decompositions = result.decompositions or problem.decompositions
        compressed = problem.prepared.apply(result.plan, decompositions)
        if "latency" not in problem.bounds:
            return AllocatedNetwork(result, compressed, decompositions)
        table = problem.latency
        assert table is not None  # since latency is bounded
        allowed = problem.bounds["latency"] * table.dense
        latency = {"dense": table.dense, "allowed": allowed, "predicted": table.predicted(result.plan)}
        latency["measured"] = table.measured(compressed, timing)
        shares = {name: f"{value / latency['dense']:.1%}" for name, value in latency.items()}
        log.info("latency, relative to the original: %(predicted)s predicted, %(measured)s measured", shares)
        deviation = abs(latency["measured"] / latency["predicted"] - 1)
        if deviation <= LATENCY_TOLERANCE or num_corrections == MAX_CORRECTIONS:
            return AllocatedNetwork(result, compressed, decompositions, latency)
        table.correct(result.plan, latency["measured"])
        num_corrections += 1


def search_plan(problem: AllocationProblem, search: Search) -> SearchResult:
    """Run a search, unless the dense plan fits. Raises `ValueError` if the search's plan exceeds the budget."""
    method, dense = type(search).__name__, dict.fromkeys(problem.parts)
    if problem.fits(dense):
        return SearchResult(dense)
    result = search.allocate(problem)
    _refuse_unfit_plan(method, result.plan, problem.parts)
    for name, spent, budget in zip(problem.bounds, problem.spent(result.plan), problem.budget, strict=True):
        if spent > budget and name == "latency":
            times = 1000 * spent, 1000 * budget
            log.warning("%s predicts a latency of %.4g ms, above the allowed %.4g ms", method, *times)
        elif spent > budget:
            raise ValueError(
                f"{method} exceeds the budget: {name} of the compressed layers would be {spent:.6g}, "
                f"but at most {budget:.6g} may remain; allow more, or compress more layers"
            )
    return result


def _refuse_unfit_for_tokens(problem: AllocationProblem, search: Search) -> None:
    """Raise `ValueError`, before any data pass, for what cannot choose or merge tokens, if some parts are tokens."""
    shortening = [part.shortens for part in problem.parts.values()]
    if not any(shortening):
        return
    if not search.chooses_tokens:
        raise ValueError(
            f"{type(search).__name__} cannot choose tokens: take search=cors_fisher (profile=exact), cors or uniform"
        )
    if not isinstance(problem.estimator, TwoSidedEstimator) and not isinstance(search, Uniform):
        name = type(problem.estimator).__name__
        raise ValueError(f"{name} has no metric of tokens, only keys: take search=uniform, or {TAKE_TWO_SIDED}")
    if all(shortening) and problem.bounds.keys() != {"flops"}:
        raise ValueError('tokens alone are chosen by FLOPs: for parameters or latency, choose parts="units,tokens"')


def _refuse_hidden_costs(problem: AllocationProblem, plan: Plan, summary: Summary) -> None:
    """Raise `ValueError` if the network computes more than its plan says: some code multiplies factors in each call."""
    before, after = summary.before.flops, summary.after.flops
    if before is None or after is None or "flops" not in problem.bounds:
        return
    planned = before - problem.prepared.saved_flops(plan)
    if after > (1 + FLOPS_TOLERANCE) * planned:
        raise ValueError(
            f"{type(problem.model).__name__} would need {after:.4g} FLOPs, {planned:.4g} by its plan: its code "
            "reads `.weight` of layers that are of low rank; leave these out by layers=[...], or choose units"
        )


def _refuse_unfit_plan(search: str, plan: Plan, parts: Mapping[str, Part]) -> None:
    """Raise `ValueError` for a plan of other layers, or with a rank that a layer cannot have."""
    if wrong := ", ".join(sorted(plan.keys() ^ parts.keys())):
        raise ValueError(f"{search} must plan a rank, or None, for exactly the layers to compress; wrong for {wrong}")
    for name, rank in plan.items():
        most = parts[name].largest
        if rank is not None and (not isinstance(rank, int) or not 1 <= rank <= most):
            raise ValueError(f"{search} plans rank {rank!r} for layer {name}: give an integer in 1 .. {most}, or None")


def summarise(
    problem: AllocationProblem, search: Search, allocated: AllocatedNetwork, seconds: Mapping[str, float]
) -> Summary:
    """Describe the costs of a network, before and after, and how it was compressed."""
    prepared, result = problem.prepared, allocated.result
    proof = asdict(result.solution) if result.solution else None
    return Summary(
        **count_costs(problem, result.plan, allocated.model),
        latency=allocated.latency,
        estimator=repr(problem.estimator),
        search=repr(search),
        parts=prepared.kinds,
        widths={name: unit.largest for name, unit in prepared.units.items()},
        tokens={name: part.tokens for name, part in prepared.parts.items() if part.shortens},
        form=prepared.form.name if prepared.single_layers else "plain",
        rounding=_rounding(allocated),
        repaired={name: d.num_repaired for name, d in allocated.decompositions.items() if d.num_repaired},
        solution=proof and {name: value for name, value in proof.items() if name not in ("choices", "cost")},
        profile={
            name: [
                [rank, rank / max(1, prepared.parts[name].full_rank), errors[rank]]
                for rank in sorted(filter(None, errors))
            ]
            for name, errors in result.profile.items()
        },
        seconds=dict(seconds),
        predicted=result.predicted,
    )


def _rounding(allocated: AllocatedNetwork) -> float:
    """Largest relative error that its data type causes in a low-rank layer's weight."""
    errors = [0.0]
    for name, layer in allocated.model.named_modules():
        if isinstance(layer, LowRankLayer) and allocated.result.plan.get(name):
            factors = (*layer.factors(), *allocated.decompositions[name].truncate(layer.rank))
            left, right, *exact = (factor.detach().to(factors[0].device).double() for factor in factors)
            errors.append(relative_error(left @ right, exact[0] @ exact[1]))
    return max(errors)
