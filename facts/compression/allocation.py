"""Allocation of ranks by a search, and the resulting network; if latency is bounded, it is measured."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from facts.cost.timing import Timing, TimingPolicy, batch_seconds
from facts.decomposition.apply import Plan
from facts.decomposition.parts import Part
from facts.decomposition.truncation import Decomposition
from facts.search.base import Search, SearchResult
from facts.search.problem import AllocationProblem
from facts.utils import distributed

log = logging.getLogger(__name__)

LATENCY_TOLERANCE = 0.02  # of a predicted latency: less than the error of a measurement
MAX_CORRECTIONS = 2


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
        compressed = problem.apply(result.plan, decompositions)
        if "latency" not in problem.bounds:
            return AllocatedNetwork(result, compressed, decompositions)
        table = problem.latency
        assert table is not None  # since latency is bounded
        allowed = problem.bounds["latency"] * table.dense
        latency = {"dense": table.dense, "allowed": allowed, "predicted": table.predicted(result.plan)}
        networks = {"dense": problem.model, "compressed": compressed}
        times = batch_times(networks, table.inputs, timing, problem.calibration.execution.precision)
        latency["measured"] = times["compressed"].ratio(times["dense"]) * table.dense
        shares = {name: f"{value / latency['dense']:.1%}" for name, value in latency.items()}
        log.info("latency, relative to the original: %(predicted)s predicted, %(measured)s measured", shares)
        deviation = abs(latency["measured"] / latency["predicted"] - 1)
        if deviation <= LATENCY_TOLERANCE or num_corrections == MAX_CORRECTIONS:
            return AllocatedNetwork(result, compressed, decompositions, latency)
        table.correct(result.plan, latency["measured"])
        num_corrections += 1


def batch_times(
    networks: Mapping[str, nn.Module], inputs: Any, timing: TimingPolicy, precision: torch.dtype
) -> dict[str, Timing]:
    """Time networks in turns on the main rank; all ranks get its times."""
    return distributed.on_main_rank(partial(batch_seconds, networks, inputs, timing, precision))


def search_plan(problem: AllocationProblem, search: Search) -> SearchResult:
    """Run a search, unless the dense plan fits. Raises `ValueError` if the search's plan exceeds the budget."""
    method, dense = type(search).__name__, dict.fromkeys(problem.parts)
    if problem.fits(dense):
        return SearchResult(dense)
    result = distributed.all_gather(search.allocate(problem))[0]  # times and solutions may differ between ranks
    _refuse_unfit_plan(method, result.plan, problem.parts)
    for name, spent, budget in zip(problem.bounds, problem.spent(result.plan), problem.budget, strict=True):
        if spent > budget and name == "latency":
            log.warning("%s predicts a latency of %.4g s, above the allowed %.4g s", method, spent, budget)
        elif spent > budget:
            raise ValueError(
                f"{method} exceeds the budget: {name} of the compressed layers would be {spent:.6g}, "
                f"but at most {budget:.6g} may remain; allow more, or compress more layers"
            )
    return result


def _refuse_unfit_plan(search: str, plan: Plan, parts: Mapping[str, Part]) -> None:
    """Raise `ValueError` for a plan of other layers, or with a rank that a layer cannot have."""
    if wrong := ", ".join(sorted(plan.keys() ^ parts.keys())):
        raise ValueError(f"{search} must plan a rank, or None, for exactly the layers to compress; wrong for {wrong}")
    for name, rank in plan.items():
        most = parts[name].largest()
        if rank is not None and (not isinstance(rank, int) or not 1 <= rank <= most):
            raise ValueError(f"{search} plans rank {rank!r} for layer {name}: give an integer in 1 .. {most}, or None")
