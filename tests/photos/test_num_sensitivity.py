"""How many photos does CoRS need to compare outputs on? Several draws of each number, on a published DeiT-Tiny.

Writes `results/photos/num_sensitivity` in an hour or two. An error is a mean over photos, so photos are measured in
groups of eight, and each draw is a mean over some groups.

The rule for the default, fixed before anything was measured: the smallest number none of whose draws leaves the outputs
farther from the original's than 1.05 times what all photos do. The distance is measured on photos that no draw has;
top-1, on still others, is what the rule is judged by.
"""

import random
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean

import pytest
import torch

import facts
from facts.calibration.distance import distance
from facts.moments.losses import kl_divergence
from facts.parts import apply_plan
from facts.search import CoRS, CoRSFisher
from facts.search.base import Search, SearchResult
from facts.search.measured import Sensitivity
from tests.photos.data import Table, load_network, load_photos, top1

pytestmark = pytest.mark.external

RATIO, GROUP = 0.7, 8
DRAWS = {8: 8, 32: 8, 128: 4, 496: 1}  # photos, and how often so many are drawn; there are 496
ALLOWED = 1.05
COLUMNS = {"search": "", "photos": "", "draw": "", "distance": ".4f", "top1": ".1f"}
TEXT = (
    "# Photos that CoRS compares outputs on, deit_tiny_patch16_224\n\n"
    f"FACTS from 500 photos, pivoted layers with {RATIO} of their FLOPs. Each draw is of other photos than those. "
    "`distance` is the mean KL divergence from the original's outputs on 160 photos that no draw has, `top1` in "
    "percent on 650 validation photos, of which the dense network has {dense:.1f}. Written by "
    "`tests/photos/test_num_sensitivity.py`, which states the rule for the default."
)


@dataclass(frozen=True)
class Problem(Search):
    """Keeps the problem that it is given in `kept`."""

    kept: list

    def allocate(self, problem):
        self.kept.append(problem)
        return SearchResult(dict.fromkeys(problem.layers, 8))


def test_fewer_photos_leave_some_draws_farther():
    """By the rule the default is 512, of which there are 496 here."""
    load = partial(load_photos, network="deit_tiny")
    model, calibration, validation = load_network("deit_tiny"), load("calibration", 0, 2), load("validation")
    images, labels = (torch.cat(parts) for parts in zip(*load("calibration", 1, 2), strict=True))
    groups = list(zip(images.split(GROUP), labels.split(GROUP), strict=True))[: max(DRAWS) // GROUP]
    compared = [inputs for inputs, _ in calibration[:4]]
    kept: list = []
    facts.compress(model, calibration, search=Problem(kept), ratio=RATIO)
    (problem,), cors = kept, CoRS()
    table = Table("photos/num_sensitivity", COLUMNS, TEXT.format(dense=top1(model, validation)))
    ranks = problem.ranks_of_ratios(cors.ratios)
    measured = [Sensitivity(replace(problem, sensitivity=[group], cache=None)).profile(ranks) for group in groups]

    def add(name, num_photos, number, plan):
        small = apply_plan(problem.model, problem.decompositions, plan, problem.form)
        error = distance(problem.model, small, compared, kl_divergence, torch.float32).mean
        table.add(name, num_photos, number, error, top1(small, validation))

    for num_photos, num_draws in DRAWS.items():
        for number in range(num_draws):
            drawn = random.Random(number).sample(measured, num_photos // GROUP)
            errors = {
                name: {rank: mean(profile[name][rank] for profile in drawn) for rank in ranks[name]} for name in ranks
            }
            offered = {name: cors._interpolated(ranks[name], errors[name]) for name in ranks}
            add("CoRS", num_photos, number, cors.solve(problem, offered)[0])
    add("CoRS-Fisher", max(DRAWS), 0, CoRSFisher().allocate(replace(problem, sensitivity=groups)).plan)
    worst = table.frame[table.frame.search == "CoRS"].groupby("photos").distance.max()
    good = worst[worst <= ALLOWED * worst[max(DRAWS)]]
    assert good.index.min() == max(DRAWS) <= CoRS.num_samples, worst
