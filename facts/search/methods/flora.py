"""FLORA: a supernet over ranks, taught by the original and searched by evolution (Chang et al., 2024).

All ranks of a layer are leading parts of one pair of factors, trained by distillation and handed out with the plan.
"""

import math
import random
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn

from facts.decomposition.apply import Plan
from facts.moments.checkpointing import blocks_of
from facts.search.base import Ratios, Search, SearchResult
from facts.search.problem import AllocationProblem
from facts.search.supernet import Choices, Supernet
from facts.search.training import Training, calibration_data
from facts.utils.batches import batch_size
from facts.utils.options import Count, options
from facts.utils.progress import with_progress
from facts.utils.random import seed_of

Ranks = tuple[int | None, ...]
"""A plan's ranks, in the order of the layers."""

CLIP = 5.0  # of the gradient's norm
NUM_TRIES = 10  # for each candidate that is wanted


@options
class FLORASearch(Search):
    """All ranks of a layer are leading parts of one pair of factors, trained for all of them in turns.

    A layer's choices are its ranks at `ratios` of min(d_in, d_out), as far as they cost less than it does dense, and
    itself. Each step trains one network, whose choices are drawn with probabilities proportional to 1 / rank, towards
    the original's outputs: AdamW, its rate falling along a cosine, epoch by epoch. Then a `population` of candidates
    is improved for `num_generations`: half of the new ones are mutants, in which each block draws its choices anew with
    probability `mutation`, the other half mix the layers of two parents, which are among the `num_parents` best. All
    meet the budget; the best is the one whose outputs on the sensitivity data are nearest to the original's. The cache
    keeps the training after each epoch.

    An image of an epoch takes a pass of the original and a training step of the network. At full size, with 16,384
    images and 30 epochs, that is the work of 2 million forward passes, and the evolution takes half a million. The
    published supernet sees all of ImageNet 150 times.
    """

    ratios: Ratios = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
    num_epochs: Count = 30
    learning_rate: Annotated[float, Field(gt=0)] = 5e-5
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    population: Count = 50
    num_generations: Count = 20
    num_parents: Count = 10
    mutation: Annotated[float, Field(gt=0, le=1)] = 0.2
    seed: Annotated[int, Field(ge=0)] = 0

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        calibration = calibration_data(problem, self)
        choices = offered(problem, self.ratios)
        if not choices:
            return SearchResult(dict.fromkeys(problem.layers))
        supernet = Supernet(problem, choices)
        saved_seconds = self._train(problem, calibration, supernet)
        plan = {**dict.fromkeys(problem.layers), **Evolution(self, problem, supernet).run()}
        decompositions = {**problem.decompositions, **supernet.decompositions()}
        return SearchResult(plan, saved_seconds=saved_seconds, decompositions=decompositions)

    def _train(self, problem: AllocationProblem, calibration: Iterable[tuple[Any, Any]], supernet: Supernet) -> float:
        """Train the factors; return the seconds that the cache has saved."""
        parameters = supernet.parameters()
        optimizer = torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=self.weight_decay)
        training = Training(optimizer)
        with supernet.in_place():
            for epoch in training.epochs(problem, self, self.num_epochs):
                rng = random.Random(seed_of(self.seed, "training", epoch))
                rate = self.learning_rate * (1 + math.cos(math.pi * epoch / self.num_epochs)) / 2
                optimizer.param_groups[0]["lr"] = rate
                for inputs, _ in calibration:
                    with torch.no_grad():
                        original = supernet.outputs(inputs, {})
                    changed = supernet.outputs(inputs, low_ranks_more_often(problem, supernet.choices, rng))
                    error = problem.output_error(original, changed) / batch_size(inputs)
                    optimizer.zero_grad()
                    if error.requires_grad:  # not all layers are dense
                        error.backward()
                        nn.utils.clip_grad_norm_(parameters, CLIP)
                        optimizer.step()
        return training.saved_seconds


def offered(problem: AllocationProblem, ratios: Ratios) -> Choices:
    """Choices of each layer that has a rank cheaper than dense: ranks at ratios of min(d_in, d_out), then None."""
    choices: dict[str, list[int | None]] = {}
    for name, layer in problem.layers.items():
        ranks = sorted({max(1, round(ratio * min(layer.weight.shape))) for ratio in ratios})
        cheaper = [rank for rank in ranks if problem.share(name, rank) < problem.share(name, None)]
        if cheaper:
            choices[name] = [*cheaper, None]
    return choices


def low_ranks_more_often(problem: AllocationProblem, choices: Choices, rng: random.Random) -> Plan:
    """A random plan whose probability is proportional to the inverse of the product of its ranks (dense: full)."""

    def draw(name: str, ranks: list[int | None]) -> int | None:
        weights = [1 / (rank or min(problem.layers[name].weight.shape)) for rank in ranks]
        return rng.choices(ranks, weights)[0]

    return {name: draw(name, ranks) for name, ranks in choices.items()}


def within_budget(problem: AllocationProblem, choices: Choices, plan: Plan, rng: random.Random) -> Plan:
    """The plan after random layers went down by single choices until it fits, and then up while it fits.

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
    """Plans within the budget, and the error of each that was visited."""

    def __init__(self, search: FLORASearch, problem: AllocationProblem, supernet: Supernet):
        self.search, self.problem, self.supernet, self.choices = search, problem, supernet, supernet.choices
        self.rng = random.Random(seed_of(search.seed, "evolution"))
        self.blocks = by_block(problem, self.choices)
        self.errors: dict[Ranks, float] = {}  # by the ranks of all layers, in their order

    def run(self) -> Plan:
        """Return the best plan of all that are visited."""
        for _ in with_progress(range(self.search.num_generations), "FLORA's evolution"):
            new = self._generation()
            errors = (error if math.isfinite(error) else math.inf for error in self.supernet.errors(new.values()))
            self.errors |= zip(new, errors, strict=True)
        best = self._best(1)[0]
        if self.errors[tuple(best.values())] == math.inf:
            raise ValueError(
                "every network of FLORA's supernet has an error that is NaN or infinite: lower learning_rate"
            )
        return best

    def _generation(self) -> dict[Ranks, Plan]:
        """Mutants, mixtures, and random plans in place of those that could not be made."""
        new: dict[Ranks, Plan] = {}
        search, rng = self.search, self.rng
        if parents := self._best(search.num_parents):
            self._add(new, search.population // 2, lambda: self._mutant(rng.choice(parents), search.mutation))
            self._add(new, search.population, lambda: self._mixture(*rng.choices(parents, k=2)))
        self._add(new, search.population, lambda: self._mutant({}, probability=1.0))
        return new

    def _best(self, number: int) -> list[Plan]:
        ranked = sorted(self.errors, key=lambda ranks: self.errors[ranks])
        return [dict(zip(self.problem.layers, ranks, strict=True)) for ranks in ranked[:number]]

    def _add(self, new: dict[Ranks, Plan], total: int, child: Callable[[], Plan]) -> None:
        """Add children that were never visited until there are so many in all, or the tries are used up."""
        for _ in range(NUM_TRIES * (total - len(new))):
            if len(new) == total:
                return
            plan = within_budget(self.problem, self.choices, child(), self.rng)
            ranks = tuple(plan.values())
            if ranks not in self.errors:
                new[ranks] = plan

    def _mutant(self, parent: Plan, probability: float) -> Plan:
        """Draw the choices of some blocks anew, evenly."""
        drawn = [name for block in self.blocks if self.rng.random() < probability for name in block]
        return {**parent, **{name: self.rng.choice(self.choices[name]) for name in drawn}}

    def _mixture(self, first: Plan, second: Plan) -> Plan:
        return {name: self.rng.choice((first, second))[name] for name in first}


def by_block(problem: AllocationProblem, names: Iterable[str]) -> list[list[str]]:
    """The layers of each block of the network; one outside all blocks is one of its own."""
    places = {
        module: number
        for number, block in enumerate(blocks_of(problem.model, problem.layers.values()))
        for module in block.modules()
    }
    groups: dict[Any, list[str]] = {}
    for name in names:
        groups.setdefault(places.get(problem.layers[name], name), []).append(name)
    return list(groups.values())
