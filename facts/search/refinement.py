"""Refinement of a plan of tokens by measuring: which blocks merge more, and which merge fewer, at the same cost.

Profiles promise too much for early blocks and for large steps. So the error of the network is measured with the count
of one block changed at a time; the most promising pairs of changes that together keep the budget are measured, too,
alone and together. In the end, small merges go one by one, as long as that costs next to nothing.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise, permutations
from typing import Any

import torch
from torch import nn

from facts.calibration.data import Batch
from facts.modules.networks import autocast, evaluating
from facts.parts.base import Part, Plan
from facts.parts.tokens import set_tokens
from facts.search.base import AllocationProblem
from facts.search.sensitivity_measured import Prefix
from facts.utils.batches import batch_size, to_device
from facts.utils.progress import with_progress

NUM_ROUNDS = 4
NUM_ALONE, NUM_TOGETHER = 2, 3  # pairs of changes: measured by themselves, and at most so many at once
NUM_FINALISTS = 2  # of those pairs; the others are measured on one half of the samples only
STEPS = 12  # of so many equal ones, the first changes move one
TOLERANCE = 0.03  # of the error: so much more is taken for fewer merges
MOST_FOR_ONE = 3  # a block merges fewer than so many times the tokens that it takes over from another one
NUM_SCREENED = 64  # samples, or one batch, on which single changes are measured
Counts = dict[str, int]
Samples = Sequence[tuple[Batch, list[Any]]]


def refined(problem: AllocationProblem, chain: Sequence[Part], plan: Plan, samples: Samples, most: int) -> Plan:
    """Move tokens between the blocks of a chain while the measured error falls; other parts keep their ranks.

    At most `most` blocks merge, or as many as do. Beside each batch of the samples are the original's outputs.
    """
    everything = plan | {part.name: plan[part.name] or part.tokens for part in chain}
    network = problem.prepared.apply(everything, problem.decompositions)
    counts, step = _effective(chain, everything), max(1, chain[0].tokens // STEPS)
    moves = _Moves(problem, chain, plan, max(most, _num_merges(chain, counts)))
    for _ in with_progress(range(NUM_ROUNDS), "refinement"):
        pairs = moves.pairs(counts, step)
        used = {change for cheaper, dearer in pairs for change in ((cheaper, -1), (dearer, 1))}
        single = {(name, sign): moves.changed(counts, name, sign * step) for name, sign in sorted(used)}
        first, *errors = _measured(problem, network, chain, [counts, *single.values()], _first(samples))
        gains = {key: first - error for key, error in zip(single, errors, strict=True)}
        variants = [counts, *moves.promising(counts, step, pairs, gains)]
        if best := _place_of_least(partial(_measured, problem, network, chain), variants, samples):
            counts = variants[best]
        elif step == 1:
            break
        else:
            step = max(1, step // 2)
    most_error = math.inf
    while fewer := moves.with_fewer_merges(counts):
        error, *errors = _measured(problem, network, chain, [counts, *fewer], samples)
        most_error = min(most_error, close_to(error))
        if math.isinf(error) or min(errors) > most_error:
            break
        counts = fewer[errors.index(min(errors))]
    return plan | _as_plan(chain, counts)


def close_to(error: float) -> float:
    """The largest error that counts as equal; by rounding, the least one may be negative."""
    return error + TOLERANCE * abs(error)


def _effective(chain: Sequence[Part], plan: Mapping[str, int | None]) -> Counts:
    """The number of tokens behind each block."""
    found, left = Counts(), chain[0].tokens
    for part in chain:
        found[part.name] = left = min(left, plan[part.name] or left)
    return found


def _num_merges(chain: Sequence[Part], counts: Counts) -> int:
    return sum(count is not None for count in _as_plan(chain, counts).values())


def _first(samples: Samples) -> Samples:
    sizes = accumulate(batch_size(inputs) for (inputs, _), _ in samples)
    return samples[: max(1, sum(size <= NUM_SCREENED for size in sizes))]


def _as_plan(chain: Sequence[Part], counts: Counts) -> Plan:
    names, left = [part.name for part in chain], [chain[0].tokens, *counts.values()]
    return {name: n if n < before else None for name, n, before in zip(names, left[1:], left[:-1], strict=True)}


@dataclass(frozen=True)
class _Moves:
    """Changes of the counts of a chain's blocks that keep the budget and merge in at most `most` blocks."""

    problem: AllocationProblem
    chain: Sequence[Part]
    plan: Plan
    most: int

    @cached_property
    def parts(self) -> dict[str, Part]:
        return {part.name: part for part in self.chain}

    def changed(self, counts: Counts, name: str, by: int) -> Counts:
        """Let a block leave so many tokens more, at most as many as it has, or fewer, at least as many as the next."""
        names, number = [*self.parts], counts[name]
        place = names.index(name)
        most = counts[names[place - 1]] if place else self.parts[name].tokens
        later = names[place:]
        least = next((counts[each] for each in later if counts[each] < number), self.parts[name].least)
        left = min(most, max(least, number + by))
        return counts | {each: left for each in later if counts[each] == number}  # those that merge nothing, too

    def moved(self, counts: Counts, cheaper: str, dearer: str, step: int) -> Counts | None:
        """Let one block leave fewer tokens, and another as many more as the budget allows; None if it allows none."""
        fewer = self.changed(counts, cheaper, -step)
        *others, most = [self.changed(fewer, dearer, more) for more in range(1, step + 1)]
        others = [each for each in others if each != most]  # which may be cheap, since it merges nothing there
        fitting = others[: bisect_left(others, True, key=lambda each: not self._fits(each))]
        wanted = [*fitting, most] if self._fits(most) else fitting
        return next((each for each in reversed(wanted) if _num_merges(self.chain, each) <= self.most), None)

    def _fits(self, counts: Counts) -> bool:
        return self.problem.fits(self.plan | _as_plan(self.chain, counts))

    def with_fewer_merges(self, counts: Counts) -> list[Counts]:
        """Let the block of the smallest step merge nothing, and one next to it as much more as the budget asks for."""
        before = dict(zip(counts, [self.chain[0].tokens, *counts.values()], strict=False))
        steps = {name: before[name] - counts[name] for name in counts if counts[name] < before[name]}
        merging, found = [*steps], list[Counts]()
        smallest = min(steps, key=steps.__getitem__, default="")
        for other in (one if two == smallest else two for one, two in pairwise(merging) if smallest in (one, two)):
            for more in range(steps[smallest], MOST_FOR_ONE * steps[smallest]):
                both = self.moved(counts, other, smallest, more)
                if both and _num_merges(self.chain, both) < len(merging):
                    found.append(both)
                    break
        return found

    def pairs(self, counts: Counts, step: int) -> dict[tuple[str, str], Counts]:
        """What each pair of blocks, the first with fewer tokens and the second with more, makes of the counts."""
        found: dict[tuple[int, ...], tuple[str, str]] = {}
        for pair in permutations(self.parts, 2):
            alone = [self.changed(counts, name, by) for name, by in zip(pair, (-step, step), strict=True)]
            if counts not in alone and (both := self.moved(counts, *pair, step)) and both != counts:
                found.setdefault(tuple(both.values()), pair)
        return {pair: dict(zip(self.parts, both, strict=True)) for both, pair in found.items()}

    def promising(
        self,
        counts: Counts,
        step: int,
        pairs: Mapping[tuple[str, str], Counts],
        gains: Mapping[tuple[str, int], float],
    ) -> Iterator[Counts]:
        """The pairs with the largest gains, each alone, and then the first ones of different blocks together."""

        def gain(pair: tuple[str, str]) -> float:
            cheaper, dearer = pair
            return gains[cheaper, -1] + gains[dearer, 1] * (pairs[pair][dearer] - counts[dearer]) / step

        best = sorted(pairs, key=gain, reverse=True)
        seen = [counts, *(pairs[pair] for pair in best[:NUM_ALONE])]
        together, free = counts, {*self.parts}
        for pair in best:
            if free.issuperset(pair) and len(seen) <= NUM_ALONE + NUM_TOGETHER:
                free -= {*pair}
                together = self.moved(together, *pair, step) or together
                seen.append(together)
        yield from (each for place, each in enumerate(seen) if each not in seen[:place] and place)


def _place_of_least(
    measured: Callable[[Sequence[Counts], Samples], list[float]], variants: Sequence[Counts], samples: Samples
) -> int:
    """The place of the counts with the least error, on all samples if it is the first or among the best on a half."""
    errors = measured(variants, samples[::2])
    finalists = [0, *sorted(range(1, len(variants)), key=errors.__getitem__)[:NUM_FINALISTS]]
    later = measured([variants[place] for place in finalists], samples[1::2])
    return min(zip(finalists, later, strict=True), key=lambda each: errors[each[0]] + each[1])[0]


@torch.no_grad()
def _measured(
    problem: AllocationProblem,
    network: nn.Module,
    chain: Sequence[Part],
    variants: Sequence[Counts],
    samples: Samples,
) -> list[float]:
    """Summed errors of the outputs, infinite in place of NaN.

    Outputs of modules before a variant's first change are kept from the first variant.
    """
    prepared, device = problem.prepared, problem.device
    totals = [0.0] * len(variants)
    with evaluating(network), autocast(device, prepared.execution.precision):
        for (inputs, _), originals in samples:
            set_tokens(network, variants[0])
            prefix = Prefix(network, to_device(inputs, device))
            for place, variant in enumerate(variants):
                outputs = prefix.outputs
                if place:
                    first = next(part for part in chain if variant[part.name] != variants[0][part.name])
                    set_tokens(network, variant)
                    outputs = prefix.before([first.owner])({})
                totals[place] += prepared.output_error(originals[0], outputs).item()
    return [math.inf if math.isnan(total) else total for total in totals]
