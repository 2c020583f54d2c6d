"""Facts that hold for every search, baselines included, and the own rule of each of the package's."""

import itertools
import math
from operator import itemgetter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import facts
from experiments.baselines.dobi_svd import DobiSVDSearch
from experiments.baselines.energies import FastLRDSearch, LEMSSearch
from experiments.baselines.flora import FLORASearch
from facts.modules.forms import FORMS
from facts.search import SEARCHES, MemViTSearch, Uniform, interpolate_profile
from facts.search.sensitivity_measured import Sensitivity
from tests.networks import LAYERS, image_batches, make_model
from tests.search.problems import make_problem, plain_problem, with_energies

EVERY = {
    **{name: search() for name, search in SEARCHES.items()},
    "comcat": SEARCHES["comcat"](num_epochs=4, learning_rate=0.1),
    "dobi_svd": DobiSVDSearch(num_epochs=3),
    "fastlrd": FastLRDSearch(),
    "flora": FLORASearch(num_epochs=2, population=10, num_generations=4),
    "lems": LEMSSearch(rank_multiple=1),
}
PLAIN, PIVOTED = FORMS["plain"](), FORMS["pivoted"]()
sizes = st.integers(1, 5000)
every_search = pytest.mark.parametrize("name", EVERY)


def compress(name, **options):
    """At 70 % of the FLOPs, which narrow layers can keep to."""
    model, batches = make_model(torch.float32), image_batches([16, 16], dtype=torch.float32)
    return facts.compress(model, batches, search=EVERY[name], **{"ratio": 0.7, **options}, form="plain")


def wide_problem(**fields):
    """Three layers of 21 components at full cost: wide enough that most ranks are not measured."""
    torch.manual_seed(0)
    sizes = [(40, 48), (48, 40), (40, 48)]
    model = nn.Sequential(*(nn.Sequential(nn.Linear(*size), nn.Tanh()) for size in sizes)).double()
    problem = plain_problem(model, sensitivity=[(torch.randn(20, 40, dtype=torch.float64), None)], **fields)
    model.append(nn.Linear(48, 4, dtype=torch.float64))
    return problem


@every_search
def test_the_budget_is_kept_and_is_what_the_network_costs(name):
    result = compress(name, bounds={"params": 0.6})
    assert list(result.plan) == list(LAYERS)
    summary = result.summary
    dense = dict(zip(summary.spent, make_problem(bounds=dict.fromkeys(summary.spent, 0.5)).dense, strict=True))
    for cost, spent in summary.spent.items():
        assert spent <= summary.budget[cost]
        assert getattr(summary.before, cost) - getattr(summary.after, cost) == dense[cost] - spent
    assert all(rank is None or rank >= 1 for rank in result.plan.values())
    if summary.solution:
        assert summary.solution["status"] == "optimal" and summary.solution["gap"] == 0
    for layer, entries in summary.profile.items():
        full = make_problem().full_rank(layer)
        assert entries == sorted(entries) and all(ratio == rank / full for rank, ratio, _ in entries)


@every_search
def test_a_layer_that_no_rank_makes_smaller_in_half_precision(name):
    """One input: even a single component costs more than the layer."""
    model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24)).bfloat16()
    batches = [(torch.randn(16, 1).bfloat16(), torch.randint(24, (16,)))]
    result = facts.compress(model, batches, search=EVERY[name], ratio=0.7, layers=["0", "2"])
    assert result.summary.spent["flops"] <= result.summary.budget["flops"]
    assert result.plan["2"] is not None
    assert {parameter.dtype for parameter in result.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["uniform", "asvd", "flar"])
def test_a_search_that_cannot_meet_the_budget_says_by_how_much(name):
    with pytest.raises(ValueError, match=r"of 0\.05 of the flops is too little: \w+ needs at least 0\.\d+ with layers"):
        compress(name, ratio=0.05)


@pytest.mark.parametrize("interpolation", ["windows", "none"])
def test_cors_finds_the_best_plan_there_is(interpolation):
    """Among all the ranks on offer, with errors interpolated from those that were measured."""
    problem = wide_problem(bounds={"flops": 0.6, "params": 0.65})
    result = SEARCHES["cors"](interpolation=interpolation, rank_multiple=2).allocate(problem)
    measured = Sensitivity(problem).profile({name: [2, 6, 10, 14, 18] for name in problem.layers})
    assert result.profile == measured
    errors = dict(measured)
    for name, points in measured.items() if interpolation != "none" else ():
        ratios, offered = np.array(list(points)) / 21, np.arange(2, 19, 2)
        values = interpolate_profile(ratios, list(points.values()), offered / 21, interpolation)
        errors[name] = dict(zip(offered.tolist(), values, strict=True))
    choices = itertools.product(*([*errors[name], None] for name in problem.layers))
    fitting = filter(problem.fits, (dict(zip(problem.layers, ranks, strict=True)) for ranks in choices))
    least = min(math.fsum(errors[name][rank] for name, rank in plan.items() if rank) for plan in fitting)
    assert result.solution.error == pytest.approx(least, rel=1e-9) and problem.fits(result.plan)


def test_asvd_takes_the_best_cut_through_the_sorted_errors():
    """Behind each cut, the smallest rank of each layer."""
    problem = make_problem(bounds={"flops": 0.6})
    result = SEARCHES["asvd"]().allocate(problem)
    entries = [(-error, name, rank) for name, errors in result.profile.items() for rank, error in errors.items()]
    entries.sort(key=itemgetter(0))
    cuts = [entries[cut:] for cut in range(len(entries) + 1)]
    plans = [{n: min((r for _, m, r in behind if m == n), default=None) for n in problem.layers} for behind in cuts]
    fitting = [plan for plan in plans if problem.fits(plan)]
    assert result.plan == fitting[-1] and len(fitting) < len(plans)


def test_flar_gives_every_layer_the_smallest_rank_under_one_threshold():
    """The smallest threshold that meets the budget, read off a table of all errors."""
    problem = wide_problem(bounds={"flops": 0.6})
    result = SEARCHES["flar"](rank_multiple=4).allocate(problem)
    offered = {name: [4, 8, 12, 16, 20] for name in problem.layers}
    errors = Sensitivity(problem, of="features").profile(offered)
    for profile in errors.values():
        assert list(profile.values()) == sorted(profile.values(), reverse=True)  # as binary searches need it

    def under(threshold):
        ranks = {name: [rank for rank in offered[name] if errors[name][rank] <= threshold] for name in offered}
        return {name: min(ranks[name], default=None) for name in offered}

    thresholds = sorted(error for profile in errors.values() for error in profile.values())
    assert result.plan == next(plan for plan in map(under, thresholds) if problem.fits(plan))
    assert all(profile.items() <= errors[name].items() for name, profile in result.profile.items())


@pytest.mark.parametrize(("least_ratio", "plan"), [(0.1, {"0.fc": 9, "1.fc": 1}), (0.5, {"0.fc": 5, "1.fc": 5})])
def test_memvit_cuts_less_and_less(least_ratio, plan):
    """Half of the cost, ten components, is to go, half of the rest in each step: 5, 3 of 2.5, 2 of 1.25, and 1.

    The second layer loses nothing down to rank 1; where its least rank stops it, the first goes on.
    """
    energies = {"0.fc": torch.arange(20, 0, -1).square(), "1.fc": torch.tensor([1e6] + [0.0] * 19)}
    assert MemViTSearch(decay=1 / math.log(2), least_ratio=least_ratio).allocate(with_energies(energies)).plan == plan


@pytest.mark.parametrize(("squared", "plan"), [(False, {"0.fc": 2, "1.fc": 8}), (True, {"0.fc": 1, "1.fc": 9})])
def test_memvit_takes_singular_values_as_they_are_or_squared(squared, plan):
    """One value of ten beside 19 of one is 34 % of their sum, and 84 % of that of squares; the others are equal."""
    problem = with_energies({"0.fc": torch.tensor([100.0] + [1.0] * 19), "1.fc": torch.ones(20)})
    assert MemViTSearch(decay=1 / math.log(2), squared=squared).allocate(problem).plan == plan


@pytest.mark.parametrize(
    ("losses", "plan"),
    [
        ((math.e**2, math.e**4), (3, 6)),  # logarithms 2 and 4: two thirds and one third of the whole are removed
        ((math.e**0.1, math.e**10), (1, 9)),  # 0.99 would be more than the 0.9 that can go
        ((1.0, math.e**4), (5, 5)),  # no logarithm to divide by
    ],
)
def test_svd_llm_v2_removes_shares_by_the_logarithm_of_losses(losses, plan):
    """In layers of one type; a layer of another keeps half. Each loses so much at every rank below 20."""
    lost = dict(zip(("0.fc", "1.fc", "0.qkv"), (*losses, math.e**3), strict=True))
    problem = with_energies({name: torch.tensor([0.0] * 19 + [loss**2]) for name, loss in lost.items()})
    assert SEARCHES["svd_llm_v2"]().allocate(problem).plan == dict(zip(lost, (*plan, 5), strict=True))


def test_uniform_keeps_the_tightest_ratio_as_it_is_written():
    """0.7 of 10 is 7, though the nearest float to it is less."""
    several = {"flops": 0.9, "params": 0.4}, {"flops": 0.4}, {"flops": 0.9}
    both, tightest, loose = (Uniform().allocate(make_problem(bounds=bounds)).plan for bounds in several)
    assert both == tightest != loose
    assert plain_problem(nn.Sequential(nn.Linear(10, 1, bias=False)), bounds={"params": 0.7}).budget == (7,)


@pytest.mark.parametrize(
    ("d_out", "d_in", "ratio", "expected"),
    [
        (768, 768, 0.5, 192),
        (2304, 768, 0.5, 288),
        (3072, 768, 0.6, 368),  # int(614 * 0.6)
        (1024, 4096, 0.4, 327),
        (10, 1, 0.4, 1),  # never less than one component
    ],
)
def test_rank_of_ratio(d_out, d_in, ratio, expected):
    assert PLAIN.rank_of_ratio(d_out, d_in, ratio) == expected


@given(d_out=sizes, d_in=sizes)
def test_full_rank_is_the_largest_that_costs_no_more_than_dense(d_out, d_in):
    rank = PLAIN.full_rank(d_out, d_in)
    assert rank * (d_out + d_in) <= d_out * d_in < (rank + 1) * (d_out + d_in) and rank <= min(d_out, d_in)


@given(d_out=sizes, d_in=sizes, percent=st.integers(1, 100))
def test_pivoted_rank_is_the_largest_within_the_ratio(d_out, d_in, percent):
    def fits(rank):
        return 100 * PIVOTED.num_weights(d_out, d_in, rank) <= percent * d_out * d_in

    rank = PIVOTED.rank_of_ratio(d_out, d_in, percent / 100)
    assert fits(rank) or rank == 1
    assert rank == min(d_out, d_in) or not fits(rank + 1)
    assert PIVOTED.num_weights(d_out, d_in, PIVOTED.full_rank(d_out, d_in)) == d_out * d_in


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("step", [4, 16])
def test_rounded_ranks_spend_the_same_budget(ratio, step):
    model = nn.ModuleDict({f"{n}": nn.Linear(40 + 8 * n, 120) for n in range(8)} | {"narrow": nn.Linear(4, 6)})
    problem = plain_problem(model, {}, {"params": ratio})
    exact, rounded = (Uniform(rank_multiple=multiple).allocate(problem).plan for multiple in (1, step))
    assert problem.fits(rounded)
    assert all(rank % step == 0 for name, rank in rounded.items() if name != "narrow" and rank >= step)
    assert all(abs(rounded[name] - rank) < step for name, rank in exact.items())
    assert all(rank <= problem.full_rank(name) for name, rank in rounded.items())
    # What is left does not pay for one more step of any layer that was rounded down and would still be cheaper by it.
    for name, rank in rounded.items():
        if rank + step <= problem.full_rank(name):
            assert rank >= exact[name] or not problem.fits(rounded | {name: rank + step})
    assert rounded["narrow"] == exact["narrow"]
