"""Integer programs that choose all ranks at once and, for tokens, the dynamic program around them.

A block costs as many times what its widths cost as it has tokens, so the two do not separate. At a price of a unit of
cost, the least of errors and price over the tokens of each block is found exactly, each block choosing its widths; the
price is found by bisection, and what it leaves of the budget goes into tokens and widths (docs/methods.md).
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from facts.calibration.data import Batch
from facts.calibration.outputs import distance
from facts.parts import Part
from facts.parts.base import Plan
from facts.search.base import AllocationProblem, Profile, Search
from facts.search.integer_program import Allocation, allocate
from facts.search.refinement import close_to, refined
from facts.utils.options import Positive, options

NUM_HALVINGS = 40  # of the range of prices
MERGE = 0.004  # of the budget is what a block costs that merges, beside what is counted
MOST_MERGES = 6  # in one list of blocks: until then, that cost is doubled
NUM_COMPARED = 256  # samples on which plans are compared


class Limits(NamedTuple):
    """Where a plan merges: no block but the last one merges more than the fraction `most` of the tokens.

    Errors are multiplied by `discount`. The share `spared` of the blocks, the first ones, merge nothing.
    """

    most: float = math.inf
    discount: float = 1.0
    spared: float = 0.0


# Profiles promise too much for early blocks, for large steps, and for widths against tokens: measurement decides.
FREE = Limits()
ALONE = Limits(0.14), Limits(0.2, 1.0, 0.25), Limits(0.25), Limits(0.4), FREE
WITH_WIDTHS = Limits(0.14, 0.5), Limits(0.25), Limits(0.2, 0.5, 0.25), Limits(0.14, 0.25, 0.25)


@options
class MILPSearch(Search):
    """If no choice is proved optimal within `time_limit` seconds, the best one found is taken."""

    time_limit: Positive = 60.0

    def best_plan(self, problem: AllocationProblem, errors: Profile) -> tuple[Plan, Allocation]:
        """Find the plan with the least total error within the budget; dense layers have their error at None, or 0.

        With tokens, a few plans are compared on the sensitivity data, if there are any.
        """
        program = TokenProgram(problem, errors)
        if not program.chains:
            return self._widths(problem, errors, {})
        plans: list[tuple[Plan, Allocation]] = []
        reason = ValueError("even one token in each block costs more than the budget: allow more")
        for tokens in program.plans():
            try:
                plan, solution = self._widths(problem, errors, tokens)
            except ValueError as error:  # these tokens leave too little for the narrowest widths
                reason = error
                continue
            if problem.fits(plan) and all(plan != other for other, _ in plans):
                lost = program.error(plan)
                plans.append((plan, replace(solution, error=solution.error + lost, bound=solution.bound + lost)))
        if not plans:
            raise reason
        if problem.sensitivity is None or not any(program.num_merges(plan) for plan, _ in plans):
            return min(plans, key=lambda each: each[1].error)
        samples = [(batch, list[Any]()) for batch in problem.sensitivity.few_samples(NUM_COMPARED)]
        least, measured = math.inf, list[float]()
        for plan, _ in plans:
            measured.append(summed_error(problem, plan, samples, close_to(least)))
            least = min(least, measured[-1])
        close = [each for each, lost in zip(plans, measured, strict=True) if lost <= close_to(least)]
        plan, solution = min(close, key=lambda each: program.num_merges(each[0]))
        before = program.error(plan)
        for chain in program.chains if program.num_merges(plan) else ():
            plan = refined(problem, chain, plan, samples, MOST_MERGES)
        change = program.error(plan) - before
        return plan, replace(solution, error=solution.error + change, bound=solution.bound + change)

    def _widths(
        self, problem: AllocationProblem, errors: Profile, tokens: Mapping[str, int | None]
    ) -> tuple[Plan, Allocation]:
        """Find the plan with the least total error among those with these `tokens`."""
        spent = problem.spent(tokens) if tokens else (0,) * len(problem.bounds)
        budget = tuple(most - used for most, used in zip(problem.budget, spent, strict=True))
        choices = {name: list(dict.fromkeys([*ranks, None])) for name, ranks in errors.items() if name not in tokens}
        if not choices:
            nothing = Allocation(choices={}, cost=spent, error=0.0, bound=0.0, gap=0.0, status="optimal")
            return {name: tokens[name] for name in problem.parts}, nothing
        profiles = {
            name: [(problem.cost(name, rank, tokens), errors[name].get(rank, 0.0)) for rank in ranks]
            for name, ranks in choices.items()
        }
        solution = allocate(profiles, budget, time_limit=self.time_limit)
        chosen = {name: choices[name][index] for name, index in solution.choices.items()}
        return {name: tokens[name] if name in tokens else chosen[name] for name in errors}, solution


def summed_error(
    problem: AllocationProblem, plan: Plan, samples: Iterable[tuple[Batch, list[Any]]], most: float
) -> float:
    """The summed error of the outputs with a plan; infinite as soon as it exceeds `most`.

    Beside each batch are the original's outputs, which are computed for the first plan.
    """
    prepared, total = problem.prepared, 0.0
    changed = prepared.apply(plan, problem.decompositions)
    how = prepared.output_error, prepared.execution.precision
    for batch, originals in samples:
        found = distance(prepared.model, changed, [batch], *how, originals=originals)
        total += found.mean * found.num_samples if found else 0.0
        if total > most:
            return math.inf
    return total


@dataclass(frozen=True)
class TokenProgram:
    """Token counts on offer and errors of all parts, for a problem in which some parts shorten others' inputs."""

    problem: AllocationProblem
    errors: Profile

    @cached_property
    def chains(self) -> list[list[Part]]:
        """The parts that shorten, by lists of blocks, each in order."""
        found: dict[str, list[Part]] = {}
        for part in self.problem.parts.values():
            if part.shortens:
                found.setdefault((*part.stages, part.name)[0], []).append(part)
        return list(found.values())

    @cached_property
    def within(self) -> dict[str, list[str]]:
        """The parts whose tokens each shortening part decides, if those of the next block do not."""
        inside: dict[str, list[str]] = {name: [] for name, part in self.problem.parts.items() if part.shortens}
        for name, part in self.problem.parts.items():
            if part.stages and not part.shortens:
                inside[part.stages[-1]].append(name)
        return inside

    def cost(self, name: str, choice: int | None, plan: Plan) -> float:
        """Cost of a part as a share of the budget: that of the first bound which tokens can meet."""
        return self.problem.cost(name, choice, plan)[self.place] / self.problem.budget[self.place]

    @cached_property
    def place(self) -> int:
        """The place of the first bound which tokens can meet."""
        return next(place for place, cost in enumerate(self.problem.bounds) if cost != "params")

    @cached_property
    def cumulative(self) -> dict[str, dict[int, float]]:
        """By block, the error at each count on offer, in descending order: never less for fewer tokens."""
        found = {}
        for chain in self.chains:
            counts = [chain[0].tokens, *reversed(chain[0].candidates(1, 1, (0, 1)))]
            for part in chain:
                known = {part.tokens: 0.0} | {rank: error for rank, error in self.errors[part.name].items() if rank}
                ranks = sorted(known)
                errors = np.interp(counts, ranks, [known[rank] for rank in ranks])
                found[part.name] = dict(zip(counts, np.maximum.accumulate(errors).tolist(), strict=True))
        return found

    def tokens_at(self, price: float, limits: Limits = FREE, merge: float = 0.0) -> Plan:
        """The counts of all blocks with the least errors plus cost at a price, which costs a whole budget.

        To merge at all costs `merge` of the budget.
        """
        plans = (self._chain_at(chain, price, limits, merge) for chain in self.chains)
        return {name: count for plan in plans for name, count in plan.items()}

    def _chain_at(self, chain: list[Part], price: float, limits: Limits, merge: float) -> Plan:
        counts = [*self.cumulative[chain[0].name]]
        start = np.full(len(counts), np.inf)
        start[0] = 0.0  # all tokens enter the first block
        origins, steps = [], np.subtract.outer(counts, counts)
        for place, part in enumerate(chain):
            errors = limits.discount * np.array([*self.cumulative[part.name].values()])
            tables = [self._tables[name] for name in self.within[part.name]]
            within = sum((lost + price * costs).min(axis=1) for _, lost, costs in tables)
            total = (start - errors)[:, None] + (errors + within)[None] + price * self._own_costs[part.name]
            total += price * merge * (steps > 0)
            largest = math.inf if part is chain[-1] else limits.most * counts[0]  # no block behind reads those
            if place < limits.spared * len(chain):
                largest = 0
            total[(steps < 0) | (steps > largest)] = np.inf  # tokens do not come back
            origins.append(total.argmin(axis=0))
            start = total.min(axis=0)
        at, plan = int(start.argmin()), Plan()
        for part, origin in zip(reversed(chain), reversed(origins), strict=True):
            before = int(origin[at])
            plan[part.name] = None if before == at else counts[at]
            at = before
        return plan

    @cached_property
    def _own_costs(self) -> dict[str, np.ndarray]:
        """By block, the cost of merging, and of layers in no other part, by the counts `[entering, going on]`."""
        found = {}
        for part in itertools.chain(*self.chains):
            counts = [*self.cumulative[part.name]]
            plans: list[Plan] = [dict.fromkeys(part.stages, entering) for entering in counts]
            found[part.name] = np.array([[self.cost(part.name, left, plan) for left in counts] for plan in plans])
        return found

    @cached_property
    def _tables(self) -> dict[str, tuple[list[int | None], np.ndarray, np.ndarray]]:
        """Every other part's choices, dense first, their errors, and costs `[tokens that the part sees, choices]`."""
        tables = {}
        for name, part in self.problem.parts.items():
            if not part.shortens:
                choices = {None: 0.0, **self.errors[name]}
                plans: list[Plan] = [dict.fromkeys(part.stages[-1:], count) for count in self._seen(part)]
                costs = [[self.cost(name, rank, plan) for rank in choices] for plan in plans]
                tables[name] = [*choices], np.array([*choices.values()]), np.array(costs)
        return tables

    def _seen(self, part: Part) -> list[int]:
        """The counts of tokens that a part may see."""
        return [*self.cumulative[part.stages[-1]]] if part.stages else [part.tokens]

    def widths_at(self, price: float, tokens: Plan) -> Plan:
        """The choice of every other part at a price."""
        plan = dict(tokens)
        for name, (choices, errors, costs) in self._tables.items():
            part = self.problem.parts[name]
            seen = self._seen(part).index(part.remaining(tokens))
            plan[name] = choices[(errors + price * costs[seen]).argmin()]
        return plan

    def few_merges(self, limits: Limits) -> Plan:
        """The counts within the budget, with a cost of merging at which no list of blocks has too many merges."""
        merge = MERGE
        plan = self.within_budget(limits, merge)
        while self.num_merges(plan) > MOST_MERGES * len(self.chains) and merge < 1:  # the limit may ask for more
            merge *= 2
            plan = self.within_budget(limits, merge)
        return plan

    def num_merges(self, plan: Plan) -> int:
        """How many blocks merge tokens with a plan."""
        return sum(plan[part.name] is not None for chain in self.chains for part in chain)

    def within_budget(self, limits: Limits, merge: float) -> Plan:
        """The counts at the least price at which they and the widths at that price fit the budget."""
        low, high = 1e-9, 1e9
        for _ in range(NUM_HALVINGS):
            price = math.sqrt(low * high)
            tokens = self.tokens_at(price, limits, merge)
            if self.problem.fits(self.widths_at(price, tokens)):
                high = price
            else:
                low = price
        return self.tokens_at(high, limits, merge)

    def plans(self) -> Iterator[Mapping[str, int | None]]:
        """Counts of tokens to compare: the program's with several limits, and, without widths, equal steps."""
        if self.problem.bounds.keys() == {"params"}:  # of which tokens have none
            yield {part.name: None for chain in self.chains for part in chain}
            return
        if not any(self.within.values()):
            yield from (self.spent_on(self.few_merges(limits)) for limits in ALONE)
            yield self.problem.at_common_ratio(self.constant)
            return
        yield from map(self.few_merges, WITH_WIDTHS)

    def constant(self, ratio: float) -> dict[str, int]:
        """The same number of tokens merged in each block, such that `ratio` of them remain on average."""
        return {part.name: part.rank_of_ratio(ratio) for chain in self.chains for part in chain}

    def error(self, tokens: Plan) -> float:
        """The error of counts of tokens, each block's beyond those of the blocks before it."""
        total = 0.0
        for chain in self.chains:
            entering = chain[0].tokens
            for part in chain:
                if count := tokens[part.name]:
                    counts, errors = zip(*reversed(self.cumulative[part.name].items()), strict=True)
                    least, most = np.interp((entering, count), counts, errors)
                    total += float(most - least)
                    entering = count
        return total

    def spent_on(self, plan: Plan) -> Plan:
        """Raise the counts of a plan one step at a time, first where the error falls most, while the budget holds."""
        while True:
            raised = [each for each in self._raised(plan) if self.problem.fits(each)]
            best = min(raised, key=self.error, default=plan)
            if not raised or self.error(best) >= self.error(plan):
                return plan
            plan = best

    def _raised(self, plan: Plan) -> Iterator[Plan]:
        for chain in self.chains:
            entering = chain[0].tokens
            for part in chain:
                if count := plan[part.name]:
                    higher = min(each for each in self.cumulative[part.name] if each > count)
                    yield plan | {part.name: higher if higher < entering else None}
                    entering = count
