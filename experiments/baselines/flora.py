"""FLORA: a supernet over ranks, trained by distillation and searched by evolution (Chang et al., 2024)."""

import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from facts.calibration.data import Batch
from facts.decomposition.truncation import Decomposition
from facts.modules.networks import blocks_of, frozen, replaced_forwards
from facts.search import AllocationProblem, Plan, Search, SearchResult
from facts.search.base import Ratios
from facts.search.training import Training, current_outputs
from facts.utils.batches import batch_size
from facts.utils.numerics import seed_of
from facts.utils.options import Count, NotNegative, Positive, Seed, options
from facts.utils.progress import with_progress

Choices = Mapping[str, list[int | None]]
"""Layer name to the ranks on offer in ascending order, then None for dense."""

CLIP = 5.0  # of the gradient's norm
NUM_TRIES = 10  # per wanted candidate


@options
class FLORASearch(Search):
    """All ranks of a layer are leading parts of one pair of factors, trained for all of them in turn.

    A layer's choices are its ranks at `ratios` of min(d_in, d_out), if cheaper than dense, and staying dense. Each step
    trains one network, whose choices are drawn with probabilities proportional to 1 / rank, towards the original's
    outputs; AdamW's rate falls along a cosine. Then a `population` of candidates is improved for `num_generations`:
    half of the new ones are mutants, in which each block redraws its choices with probability `mutation`, and half mix
    the layers of two of the `num_parents` best. All meet the budget; the best is the one whose outputs on the
    sensitivity data are nearest to the original's. The trained factors come with the plan.
    """

    ratios: Ratios = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
    num_epochs: Count = 30
    learning_rate: Positive = 5e-5
    weight_decay: NotNegative = 0.01
    population: Count = 50
    num_generations: Count = 20
    num_parents: Count = 10
    mutation: Annotated[float, Field(gt=0, le=1)] = 0.2
    seed: Seed = 0

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        choices = offered(problem, self.ratios)
        if not choices:
            return SearchResult(dict.fromkeys(problem.layers))
        supernet = Supernet(problem, choices)
        self.train(problem, supernet)
        plan = {**dict.fromkeys(problem.layers), **Evolution(self, problem, supernet).run()}
        return SearchResult(plan, decompositions={**problem.decompositions, **supernet.decompositions()})

    def train(self, problem: AllocationProblem, supernet: "Supernet") -> None:
        optimizer = torch.optim.AdamW(supernet.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        generators = [random.Random(seed_of(self.seed, "training", epoch)) for epoch in range(self.num_epochs)]

        def loss_at(epoch: int, batch: Batch) -> Tensor:
            inputs, _ = batch
            with torch.no_grad():
                original = supernet.outputs(inputs, {})
            plan: Plan = {}
            for name, ranks in supernet.choices.items():
                full = min(problem.layers[name].weight.shape)
                (plan[name],) = generators[epoch].choices(ranks, [1 / (rank or full) for rank in ranks])
            return problem.prepared.output_error(original, supernet.outputs(inputs, plan)) / batch_size(inputs)

        training = Training(optimizer, self.num_epochs, last_rate=0.0, clip=CLIP)
        training.run(problem, self, supernet.forwards(), loss_at)


def offered(problem: AllocationProblem, ratios: Ratios) -> Choices:
    """Choices of each layer that has a rank cheaper than dense: ranks at ratios of min(d_in, d_out), then None."""
    choices: dict[str, list[int | None]] = {}
    for name, layer in problem.layers.items():
        ranks = sorted({max(1, round(ratio * min(layer.weight.shape))) for ratio in ratios})
        if cheaper := [rank for rank in ranks if problem.share(name, rank) < problem.share(name, None)]:
            choices[name] = [*cheaper, None]
    return choices


class Supernet:
    """The problem's network with `choices` for some layers, whose factors start as their decompositions."""

    def __init__(self, problem: AllocationProblem, choices: Choices):
        self.problem, self.choices = problem, choices
        self.layers = {name: _Elastic(problem, name, max(filter(None, ranks))) for name, ranks in choices.items()}

    def parameters(self) -> list[Tensor]:
        return [factor for layer in self.layers.values() for factor in (layer.left, layer.right)]

    def forwards(self) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
        """The forward functions with which the problem's network runs as the supernet."""
        return {layer.dense: layer.forward for layer in self.layers.values()}

    def outputs(self, inputs: Any, plan: Plan) -> Any:
        """The outputs at some ranks, with `forwards` in place; layers without a rank are dense."""
        for name, layer in self.layers.items():
            layer.rank = plan.get(name)
        return current_outputs(self.problem.prepared, inputs)

    def errors(self, plans: Iterable[Plan]) -> list[float]:
        """Sum the error of the outputs over the sensitivity data, for each plan."""
        plans, error = list(plans), self.problem.prepared.output_error
        totals = torch.zeros(len(plans), dtype=torch.float64)
        with torch.no_grad(), frozen(self.problem.model), replaced_forwards(self.forwards()):
            for inputs, _ in self.problem.sensitivity_batches():
                original = self.outputs(inputs, {})
                errors = [error(original, self.outputs(inputs, plan)).item() for plan in plans]
                totals += torch.tensor(errors, dtype=torch.float64)
        return totals.tolist()

    def decompositions(self) -> dict[str, Decomposition]:
        """Decompositions with the supernet's factors, each with as many components as the layer's highest rank."""
        found = {}
        for name, layer in self.layers.items():
            start, left, right = self.problem.decompositions[name], layer.left.detach(), layer.right.detach()
            found[name] = replace(start, left=left, right=right, energies=start.energies[: len(right)])
        return found


class _Elastic:
    """One layer at a `rank`, or dense."""

    def __init__(self, problem: AllocationProblem, name: str, highest: int):
        self.dense: nn.Linear = problem.layers[name]
        self.rank: int | None = None
        weight, decomposition = self.dense.weight.detach(), problem.decompositions[name]
        factors = (factor.to(weight.device) for factor in decomposition.truncate(highest))
        self.left, self.right = (factor.detach().clone().requires_grad_() for factor in factors)
        mean = decomposition.mean
        self.mean = weight.new_zeros(weight.shape[1]) if mean is None else mean.to(weight)
        self.offset = nn.functional.linear(self.mean, weight, self.dense.bias).detach()  # all ranks keep it

    def forward(self, x: Tensor) -> Tensor:
        if self.rank is None:
            return nn.functional.linear(x, self.dense.weight, self.dense.bias)
        left, right = self.left[:, : self.rank].to(x), self.right[: self.rank].to(x)
        return nn.functional.linear(nn.functional.linear(x - self.mean.to(x), right), left, self.offset.to(x))


def within_budget(problem: AllocationProblem, choices: Choices, plan: Plan, rng: random.Random) -> Plan:
    """Lower random layers one choice at a time until the plan fits, then raise them while it fits.

    Layers without choices are dense. If even the lowest choices cost too much, they are the plan.
    """
    plan = {**dict.fromkeys(problem.layers), **plan}

    def moved(name: str, step: int) -> Plan:
        return {**plan, name: choices[name][choices[name].index(plan[name]) + step]}

    movable = [name for name in choices if plan[name] != choices[name][0]]
    while movable and not problem.fits(plan):
        name = rng.choice(movable)
        plan = moved(name, -1)
        if plan[name] == choices[name][0]:
            movable.remove(name)
    movable = [name for name in choices if plan[name] is not None]
    while movable:
        name = rng.choice(movable)
        if problem.fits(higher := moved(name, 1)):
            plan = higher
        if plan is not higher or plan[name] is None:
            movable.remove(name)
    return plan


class Evolution:
    """An evolution of plans within the budget, with the error of each visited plan."""

    def __init__(self, search: FLORASearch, problem: AllocationProblem, supernet: Supernet):
        self.search, self.problem, self.supernet, self.choices = search, problem, supernet, supernet.choices
        self.rng = random.Random(seed_of(search.seed, "evolution"))
        self.blocks = by_block(problem, self.choices)
        self.errors: dict[tuple, float] = {}  # by the ranks of all layers, in their order

    def run(self) -> Plan:
        """Return the best of all visited plans."""
        for _ in with_progress(range(self.search.num_generations), "FLORA's evolution"):
            new = self._generation()
            errors = (error if math.isfinite(error) else math.inf for error in self.supernet.errors(new.values()))
            self.errors |= zip(new, errors, strict=True)
        (best,) = self._best(1)
        if self.errors[tuple(best.values())] == math.inf:
            raise ValueError("the error of every network in FLORA's supernet is NaN or infinite: lower learning_rate")
        return best

    def _generation(self) -> dict[tuple, Plan]:
        """Make mutants and mixtures, with random plans for those that could not be made."""
        new: dict[tuple, Plan] = {}
        search, rng = self.search, self.rng
        if parents := self._best(search.num_parents):
            self._add(new, search.population // 2, lambda: self.mutant(rng.choice(parents), search.mutation))
            self._add(new, search.population, lambda: self.mixture(*rng.choices(parents, k=2)))
        self._add(new, search.population, lambda: self.mutant({}, probability=1.0))
        return new

    def _best(self, number: int) -> list[Plan]:
        ranked = sorted(self.errors, key=lambda ranks: self.errors[ranks])
        return [dict(zip(self.problem.layers, ranks, strict=True)) for ranks in ranked[:number]]

    def _add(self, new: dict[tuple, Plan], total: int, child: Callable[[], Plan]) -> None:
        """Add unvisited children until there are `total`, or the tries are used up."""
        for _ in range(NUM_TRIES * (total - len(new))):
            if len(new) == total:
                return
            plan = within_budget(self.problem, self.choices, child(), self.rng)
            ranks = tuple(plan.values())
            if ranks not in self.errors:
                new[ranks] = plan

    def mutant(self, parent: Plan, probability: float) -> Plan:
        """Redraw the choices of some blocks uniformly."""
        drawn = [name for block in self.blocks if self.rng.random() < probability for name in block]
        return {**parent, **{name: self.rng.choice(self.choices[name]) for name in drawn}}

    def mixture(self, first: Plan, second: Plan) -> Plan:
        return {name: self.rng.choice((first, second))[name] for name in first}


def by_block(problem: AllocationProblem, names: Iterable[str]) -> list[list[str]]:
    """Group layers by the network's blocks; a layer outside all blocks is a group of its own."""
    blocks = blocks_of(problem.model, problem.layers.values())
    places = {module: number for number, block in enumerate(blocks) for module in block.modules()}
    groups: dict[Any, list[str]] = {}
    for name in names:
        groups.setdefault(places.get(problem.layers[name], name), []).append(name)
    return list(groups.values())
