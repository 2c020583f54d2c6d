"""Refinement of a plan of tokens by measuring: which blocks merge more, and which merge fewer, at the same cost.

Profiles promise too much for early blocks and for large steps. So the error of the network is measured with the count
of one block changed at a time; the most promising pairs of changes that together keep the budget are measured, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice, permutations
from typing import Any

import torch
from torch import nn

from facts.calibration.data import Batch
from facts.modules.networks import autocast, evaluating
from facts.parts.base import Part, Plan
from facts.parts.tokens import set_tokens
from facts.search.base import AllocationProblem
from facts.search.measured import Prefix
from facts.utils.batches import batch_size, to_device
from facts.utils.progress import with_progress

NUM_ROUNDS = 5
NUM_PAIRS = 4  # of changes that are measured in each round
STEPS = 12  # of so many equal ones, the first changes move one
NUM_SCREENED = 64  # samples on which single changes are measured; pairs are, on all
Counts = dict[str, int]
Samples = Sequence[tuple[Batch, list[Any]]]


def refined(problem: AllocationProblem, chain: Sequence[Part], plan: Plan, samples: Samples, most: int) -> Plan:
    """Move tokens between the blocks of a chain while the measured error falls; other parts keep their ranks.

    At most `most` blocks merge, or as many as do. Beside each batch of the samples are the original's outputs.
    """
    everything = plan | {part.name: plan[part.name] or part.tokens for part in chain}
    network = problem.calibration.apply(everything, problem.decompositions)
    counts, step = _effective(chain, everything), max(1, chain[0].tokens // STEPS)
    for _ in with_progress(range(NUM_ROUNDS), "refinement"):
        changes = {(part.name, sign): _changed(chain, counts, part, sign * step) for part in chain for sign in (-1, 1)}
        changes = {key: changed for key, changed in changes.items() if changed != counts}
        first, *errors = _measured(problem, network, chain, [counts, *changes.values()], _first(samples))
        slopes = {key: error - first for key, error in zip(changes, errors, strict=True)}
        all_pairs = _pairs(problem, chain, plan, counts, changes, slopes)
        few = (pair for pair in all_pairs if _num_merges(chain, pair) <= max(most, _num_merges(chain, counts)))
        pairs = list(islice(few, NUM_PAIRS))
        best, *errors = _measured(problem, network, chain, [counts, *pairs], samples)
        if errors and min(errors) < best:
            counts = pairs[errors.index(min(errors))]
        elif step == 1:
            break
        else:
            step = max(1, step // 2)
    return plan | _as_plan(chain, counts)


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
    return samples[: 1 + sum(size < NUM_SCREENED for size in sizes)]


def _as_plan(chain: Sequence[Part], counts: Counts) -> Plan:
    names, left = [part.name for part in chain], [chain[0].tokens, *counts.values()]
    return {name: n if n < before else None for name, n, before in zip(names, left[1:], left[:-1], strict=True)}


def _changed(chain: Sequence[Part], counts: Counts, part: Part, by: int) -> Counts:
    """Let a block leave so many tokens more, at most as many as it has, or fewer, at least as many as the next."""
    names = [each.name for each in chain]
    place = names.index(part.name)
    most = counts[names[place - 1]] if place else part.tokens
    number, later = counts[part.name], names[place:]
    least = next((counts[name] for name in later if counts[name] < number), part.least)
    left = min(most, max(least, number + by))
    return counts | {name: left for name in later if counts[name] == number}  # those that merge nothing go on with them


def _pairs(
    problem: AllocationProblem,
    chain: Sequence[Part],
    plan: Plan,
    counts: Counts,
    changes: Mapping[tuple[str, int], Counts],
    slopes: Mapping[tuple[str, int], float],
) -> Iterator[Counts]:
    """Pairs of a cheaper and a dearer change that keep the budget, the most promising first."""
    found: dict[tuple[int, ...], tuple[float, Counts]] = {}
    parts = {part.name: part for part in chain}
    for (down, _), (up, _) in permutations(changes, 2):
        if down == up or (down, -1) not in changes or (up, 1) not in changes:
            continue
        cheaper = changes[down, -1]
        most = changes[up, 1][up] - counts[up]
        for more in range(most, 0, -1):
            both = _changed(chain, cheaper, parts[up], more)
            if problem.fits(plan | _as_plan(chain, both)):
                gain = slopes[down, -1] + slopes[up, 1] * (both[up] - cheaper[up]) / most
                found.setdefault(tuple(both.values()), (gain, both))
                break
    yield from (both for gain, both in sorted(found.values(), key=lambda each: each[0]) if both != counts)


@torch.no_grad()
def _measured(
    problem: AllocationProblem,
    network: nn.Module,
    chain: Sequence[Part],
    variants: Sequence[Counts],
    samples: Samples,
) -> list[float]:
    """Summed errors of the outputs; those of modules before a variant's first change are kept from the first one."""
    calibration, device = problem.calibration, problem.device
    totals = [0.0] * len(variants)
    with evaluating(network), autocast(device, calibration.execution.precision):
        for (inputs, _), originals in samples:
            set_tokens(network, variants[0])
            prefix = Prefix(network, to_device(inputs, device))
            for place, variant in enumerate(variants):
                outputs = prefix.outputs
                if place:
                    first = next(part for part in chain if variant[part.name] != variants[0][part.name])
                    set_tokens(network, variant)
                    outputs = prefix.before([first.owner])({})
                totals[place] += calibration.output_error(originals[0], outputs).item()
    return totals
