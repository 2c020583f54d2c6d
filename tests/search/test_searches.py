"""What every search promises, and what each does by its own rule."""

import itertools
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import facts
from facts.cost.ranks import candidate_ranks, ranks_between
from facts.decomposition.apply import apply_plan
from facts.modules.forms import FORMS
from facts.search import (
    SEARCHES,
    AAFMSearch,
    AllocationProblem,
    ARSSearch,
    ASVDPlusSearch,
    ASVDSearch,
    ComCatSearch,
    CoRS,
    DobiSVDSearch,
    FastLRDSearch,
    FLARSearch,
    FLORASearch,
    MemViTSearch,
    SVDLLMV2Search,
    Uniform,
    interpolate_profile,
)
from facts.search.methods.asvd_plus import block_numbers, block_weights
from facts.search.sensitivity.measured import Sensitivity
from tests.networks import LAYERS, image_batches, make_model
from tests.search.problems import by_weight_alone, losing, make_problem

QUICK = {
    "ars": ARSSearch(num_epochs=4, learning_rate=0.01),
    "comcat": ComCatSearch(num_epochs=4, learning_rate=0.1),
    "dobi_svd": DobiSVDSearch(num_epochs=3),
    "flora": FLORASearch(num_epochs=2, population=10, num_generations=4),
}
BOUNDS = {
    "flops": {"cost": "flops"},
    "params": {"cost": "params"},
    "both": {"cost": "flops", "bounds": {"params": 0.6}},
}


def compress(name, **options):
    """At 70 % of the FLOPs, of which narrow layers can really keep to."""
    model, batches = make_model(torch.float32), image_batches([16, 16], dtype=torch.float32)
    return facts.compress(model, batches, search=QUICK.get(name, name), **{"ratio": 0.7, **options}, form="plain")


def wide_problem(**fields):
    """Three layers of 21 components at full cost: wide enough that most ranks are not measured."""
    torch.manual_seed(0)
    linears = [nn.Linear(40, 48), nn.Linear(48, 40), nn.Linear(40, 48)]
    model = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in linears), nn.Linear(48, 4)).double()
    layers = {f"{number}.0": layer for number, layer in enumerate(linears)}
    decompositions = by_weight_alone(layers)
    batches = [(torch.randn(20, 40, dtype=torch.float64), None)]
    rows = dict.fromkeys(layers, 1)
    return AllocationProblem(model, layers, decompositions, rows=rows, sensitivity=batches, **fields)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("name", SEARCHES)
def test_the_budget_is_kept_and_is_what_the_network_costs(name, bounds):
    result = compress(name, **BOUNDS[bounds])
    assert list(result.plan) == list(LAYERS)
    summary = result.summary
    dense = dict(zip(summary.spent, make_problem(bounds=dict.fromkeys(summary.spent, 0.5)).dense, strict=True))
    for cost, spent in summary.spent.items():
        assert spent <= summary.budget[cost]
        saved = getattr(summary.before, cost) - getattr(summary.after, cost)
        assert saved == dense[cost] - spent
    assert all(rank is None or rank >= 1 for rank in result.plan.values())
    if summary.solution:
        assert summary.solution["status"] == "optimal" and summary.solution["gap"] == 0


def test_uniform_keeps_the_tightest_ratio():
    problem = make_problem(bounds={"flops": 0.9, "params": 0.4})
    assert Uniform().allocate(problem).plan == Uniform().allocate(make_problem(bounds={"flops": 0.4})).plan
    assert Uniform().allocate(problem).plan != Uniform().allocate(make_problem(bounds={"flops": 0.9})).plan


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_is_repeatable_and_leaves_all_of_it_dense_where_that_fits(name):
    assert compress(name).plan == compress(name).plan
    assert compress(name, ratio=1).plan == dict.fromkeys(LAYERS)


@pytest.mark.parametrize("name", ["cors", "cors_fisher", "aafm", "asvd", "asvd_plus", "flar"])
def test_errors_that_decided_are_told(name):
    profile, problem = compress(name).summary.profile, make_problem()
    assert list(profile) == list(LAYERS)
    for layer, entries in profile.items():
        assert entries == sorted(entries)
        assert all(ratio == rank / problem.full_rank(layer) and error >= 0 for rank, ratio, error in entries)


@pytest.mark.parametrize("interpolation", ["windows", "cubic", "linear", "none"])
def test_cors_finds_the_best_plan_there_is(interpolation):
    """Among all the ranks on offer, with errors interpolated from those that were measured."""
    problem = wide_problem(bounds={"flops": 0.6, "params": 0.65})
    result = CoRS(interpolation=interpolation, rank_multiple=2).allocate(problem)
    measured = Sensitivity(problem).profile({name: [2, 6, 10, 14, 18] for name in problem.layers})
    assert result.profile == measured
    errors = measured
    if interpolation != "none":
        errors = {}
        for name, points in measured.items():
            ratios, offered = np.array(list(points)) / 21, np.arange(2, 19, 2)
            values = interpolate_profile(ratios, list(points.values()), offered / 21, interpolation)
            errors[name] = dict(zip(offered.tolist(), values, strict=True))
    choices = itertools.product(*([*errors[name], None] for name in problem.layers))
    plans = [dict(zip(problem.layers, ranks, strict=True)) for ranks in choices]
    totals = [
        math.fsum(errors[name][rank] for name, rank in plan.items() if rank) for plan in plans if problem.fits(plan)
    ]
    assert result.solution.error == pytest.approx(min(totals), rel=1e-9)
    assert problem.fits(result.plan)


def test_a_budget_that_no_plan_meets_is_told_with_the_smallest_that_one_does():
    problem = make_problem(bounds={"flops": 0.05})
    with pytest.raises(ValueError, match="the smallest feasible one is") as error:
        CoRS().allocate(problem)
    smallest = float(str(error.value).rpartition(" ")[2])
    result = CoRS().allocate(make_problem(bounds={"flops": (smallest + 0.5) / problem.dense[0]}))
    assert problem.spent(result.plan) == (smallest,)


@pytest.mark.parametrize("name", ["uniform", "aafm", "asvd", "asvd_plus", "fastlrd", "flar", "memvit", "svd_llm_v2"])
@pytest.mark.parametrize("ratio", [0.05, 1e-9])
def test_a_search_that_cannot_meet_the_budget_says_by_how_much(name, ratio):
    budget = make_problem(bounds={"flops": ratio}).budget[0]
    with pytest.raises(ValueError, match=rf"above the budget: flops .* would be \d+, and {budget:.6g} are allowed"):
        compress(name, ratio=ratio)


def plans_of_all_cuts(problem, profile):
    """Behind each cut through the sorted errors, the smallest rank of each layer."""
    entries = sorted(
        ((error, name, rank) for name, errors in profile.items() for rank, error in errors.items()),
        key=lambda entry: -entry[0],
    )
    for cut in range(len(entries) + 1):
        behind = entries[cut:]
        yield {n: min((r for _, m, r in behind if m == n), default=None) for n in problem.layers}


def test_asvd_takes_the_best_cut_through_the_sorted_errors():
    problem = make_problem(bounds={"flops": 0.6})
    result = ASVDSearch().allocate(problem)
    plans = list(plans_of_all_cuts(problem, result.profile))
    fitting = [plan for plan in plans if problem.fits(plan)]
    assert result.plan == fitting[-1] and len(fitting) < len(plans)


def test_asvd_plus_takes_the_plan_of_the_nearest_outputs():
    """Among the best cuts through errors times 1 + γ h(b), each network built and run; three layers in three blocks."""
    problem = wide_problem(bounds={"flops": 0.6})
    result = ASVDPlusSearch(seed=1).allocate(problem)
    rng, plans, errors = random.Random(1), [], []
    for _ in range(10):
        decay, bias = rng.uniform(0, 3), rng.uniform(0, 7)
        sums = [sum((k + 1) ** -decay for k in range(b, 3)) for b in range(3)]
        weights = [1 + bias * (each - sums[2]) / (sums[0] - sums[2]) for each in sums]
        raised = {
            name: {rank: weight * error for rank, error in profile.items()}
            for weight, (name, profile) in zip(weights, result.profile.items(), strict=True)
        }
        plans.append([plan for plan in plans_of_all_cuts(problem, raised) if problem.fits(plan)][-1])
        network = apply_plan(problem.model, problem.decompositions, plans[-1], problem.form)
        errors.append(sum(problem.output_error(problem.model(x), network(x)).item() for x, _ in problem.sensitivity))
    assert result.plan == plans[np.argmin(errors)]
    assert max(errors) > 1.01 * min(errors)  # they differ
    assert result.profile == ASVDSearch().allocate(problem).profile


def test_asvd_plus_without_a_bias_is_asvd():
    problem = make_problem(bounds={"flops": 0.6})
    assert ASVDPlusSearch(max_bias=0).allocate(problem) == ASVDSearch().allocate(problem)


def test_blocks_are_numbered_in_the_networks_order():
    stages = nn.ModuleList(nn.ModuleDict({"reduction": nn.Linear(2, 2), "blocks": two_mlps()}) for _ in range(2))
    model = nn.ModuleDict({"embedding": nn.Linear(2, 2), "stages": stages, "head": nn.Linear(2, 2)})
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert list(block_numbers(model, layers).values()) == [0, 0, 1, 1, 2, 2, 3, 4, 4, 5, 5, 5]
    assert set(block_numbers(model, {"head": layers["head"]}).values()) == {0}


def two_mlps():
    return nn.ModuleList(nn.ModuleDict({"fc1": nn.Linear(2, 2), "fc2": nn.Linear(2, 2)}) for _ in range(2))


def test_weights_fall_from_the_first_block_to_the_last():
    assert block_weights(1, 2.0, 5.0).tolist() == [1.0]
    assert block_weights(4, 0.0, 6.0).tolist() == pytest.approx([7.0, 5.0, 3.0, 1.0], rel=1e-15)  # h is linear
    assert block_weights(4, 60.0, 6.0).tolist() == pytest.approx([7.0, 1.0, 1.0, 1.0], rel=1e-15)


@pytest.mark.parametrize("ratio", [0.4, 0.6, 0.8])
def test_flar_gives_every_layer_the_smallest_rank_under_one_threshold(ratio):
    """The smallest threshold that meets the budget, read off a table of all errors."""
    problem = wide_problem(bounds={"flops": ratio})
    result = FLARSearch(rank_multiple=4).allocate(problem)
    offered = {name: [4, 8, 12, 16, 20] for name in problem.layers}
    errors = Sensitivity(problem, of="features").profile(offered)
    for profile in errors.values():
        assert list(profile.values()) == sorted(profile.values(), reverse=True)  # as binary searches need it

    def under(threshold):
        ranks = {name: [rank for rank in offered[name] if errors[name][rank] <= threshold] for name in offered}
        return {name: min(ranks[name], default=None) for name in offered}

    thresholds = sorted(error for profile in errors.values() for error in profile.values())
    assert result.plan == next(plan for plan in map(under, thresholds) if problem.fits(plan))
    for name, profile in result.profile.items():
        assert profile.items() <= errors[name].items()


@pytest.mark.parametrize("bounds", [{"flops": 0.7}, {"params": 0.5}, {"flops": 0.8, "params": 0.6}])
def test_memvit_of_single_components_removes_those_after_which_least_energy_is_lost(bounds):
    """So slow a decay leaves one component a step: a layer's losses rise, so all are taken in their order."""
    problem = make_problem(bounds=bounds)
    plan = {name: problem.full_rank(name) for name in problem.layers}
    values = {name: problem.decompositions[name].energies.sqrt() for name in plan}
    removals = sorted(
        ((values[name][rank:].sum() / values[name].sum()).item(), -rank, name)
        for name, full in plan.items()
        for rank in range(1, full)
    )
    for _, rank, name in removals:
        if problem.fits(plan):
            break
        plan[name] = -rank
    assert MemViTSearch(decay=1e9, least_ratio=0).allocate(problem).plan == plan
    assert problem.fits(plan)


@pytest.mark.parametrize(("least_ratio", "plan"), [(0.1, {"a": 9, "b": 1}), (0.5, {"a": 5, "b": 5})])
def test_memvit_cuts_less_and_less(least_ratio, plan):
    """Half of the cost, ten components, is to go, half of the rest in each step: 5, 3 of 2.5, 2 of 1.25, and 1.

    The second layer loses nothing down to rank 1; what its least rank does not let it give, the first does.
    """
    problem = losing({"a": 2.0, "b": 1.0})
    decay = 1 / math.log(2)
    energies = {
        "a": torch.arange(20, 0, -1, dtype=torch.float64).square(),
        "b": torch.cat([torch.full((1,), 1e6), torch.zeros(19)]).double(),
    }
    decompositions = {name: replace(each, energies=energies[name]) for name, each in problem.decompositions.items()}
    problem = replace(problem, decompositions=decompositions)
    assert MemViTSearch(decay=decay, least_ratio=least_ratio).allocate(problem).plan == plan


@pytest.mark.parametrize("form", FORMS)
def test_memvit_meets_a_latency_though_times_do_not_always_rise(form):
    """As between the largest measured rank and the full one."""

    class Steps:
        dense, rest = 10.0, 1.0

        def seconds(self, name, rank):
            return 1.0 if rank is None else min(rank, 4) / 5

    problem = make_problem(bounds={"latency": 0.5}, latency=Steps(), form=FORMS[form])
    assert problem.fits(MemViTSearch().allocate(problem).plan)


@pytest.mark.parametrize(("ratio", "plan"), [(0.8, (6, None)), (0.6, (6, 6)), (0.5, (6, 3)), (0.4, (3, 3))])
def test_aafm_takes_the_step_that_raises_the_error_least_for_its_cost(ratio, plan, monkeypatch):
    """Of 800 weights the ranks 6 and 3 of a layer save 160 and 120 more: steps at 1, 2, 0.5 · 4/3 and 4 · 4/3."""
    profile = {"a": {3: 5.0, 6: 1.0}, "b": {3: 2.5, 6: 2.0}}
    measured = SimpleNamespace(profile=lambda ranks: profile, saved_seconds=0.0)
    monkeypatch.setattr("facts.search.methods.aafm.Sensitivity", lambda problem: measured)
    problem = losing(dict.fromkeys(profile, 1.0), ratio)
    assert AAFMSearch(ratios=(0.3, 0.6)).allocate(problem).plan == dict(zip("ab", plan, strict=True))


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
def test_fastlrd_removes_the_component_of_least_similarity_for_its_cost(ratio):
    """One by one, with the similarity of the matrices themselves."""
    layers = {"wide": nn.Linear(24, 72).double(), "square": nn.Linear(40, 40).double()}
    layers["square"].weight.data *= torch.linspace(0, 1, 40) ** 4
    problem = AllocationProblem(nn.Sequential(*layers.values()), layers, by_weight_alone(layers), {"params": ratio})
    weights = {name: layer.weight.detach() for name, layer in problem.layers.items()}

    def fall(name, rank):
        pairs = (torch.mm(*problem.decompositions[name].truncate(each)).flatten() for each in (rank, rank - 1))
        high, low = (torch.cosine_similarity(each, weights[name].flatten(), dim=0).item() for each in pairs)
        return (high - low) / sum(weights[name].shape)

    plan = {name: problem.full_rank(name) for name in problem.layers}
    while not problem.fits(plan):
        plan[min(plan, key=lambda name: fall(name, plan[name]))] -= 1
    assert FastLRDSearch().allocate(problem).plan == plan


@pytest.mark.parametrize(
    ("losses", "plan"),
    [
        ((math.e**2, math.e**4), (3, 6)),  # logarithms 2 and 4: two thirds and one third of the whole are removed
        ((math.e**4, math.e**4), (5, 5)),
        ((math.e**0.1, math.e**10), (1, 9)),  # 0.99 would be more than the 0.9 that can go
        ((1.0, math.e**4), (5, 5)),  # no logarithm to divide by
        ((0.5, 0.1), (5, 5)),
    ],
)
def test_svd_llm_v2_removes_shares_by_the_logarithm_of_losses(losses, plan):
    """In layers of one type; a layer of another keeps half."""
    names = ("blocks.0.fc", "blocks.1.fc")
    problem = losing({**dict(zip(names, losses, strict=True)), "blocks.0.qkv": math.e**3})
    assert SVDLLMV2Search().allocate(problem).plan == {**dict(zip(names, plan, strict=True)), "blocks.0.qkv": 5}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ratio", [0.15, 0.3, 0.5, 0.9])
def test_svd_llm_v2_keeps_the_budget_of_each_type(form, ratio):
    """And spends all of it, but for what is less than a component of each layer."""
    exponents = (12 * torch.rand(30, dtype=torch.float64)).exp().tolist()
    problem = losing({f"blocks.{number}.fc": loss for number, loss in enumerate(exponents)}, ratio, form)
    plan = SVDLLMV2Search().allocate(problem).plan
    assert problem.fits(plan)
    more = sum(problem.cost(name, rank + 1)[0] for name, rank in plan.items())
    assert more > problem.budget[0]


@pytest.mark.parametrize("name", QUICK)
def test_a_search_that_trains_wants_data(name):
    search = SEARCHES[name]()
    with pytest.raises(ValueError, match=f"{type(search).__name__} trains on calibration data: give some"):
        search.allocate(make_problem(calibration=None))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", SEARCHES)
def test_networks_of_other_types(name, dtype):
    model, batches = make_model(dtype), image_batches([16, 16], dtype=dtype)
    result = facts.compress(model, batches, search=QUICK.get(name, name), ratio=0.7)
    assert result.summary.spent["flops"] <= result.summary.budget["flops"]
    assert {parameter.dtype for parameter in result.model.parameters()} == {dtype}


@pytest.mark.parametrize("name", SEARCHES)
def test_latency_is_a_cost_like_any_other(name):
    """Where a parameter takes 2⁻²⁰ seconds, a bound on the seconds is one on the parameters."""
    by_params = make_problem(bounds={"params": 0.7})

    def seconds(name, rank):
        return by_params.cost(name, rank)[0] * 2**-20

    search = QUICK.get(name) or SEARCHES[name]()
    table = SimpleNamespace(seconds=seconds, dense=by_params.dense[0] * 2**-20, rest=0.0)
    by_seconds = make_problem(bounds={"latency": 0.7}, latency=table)
    assert search.allocate(by_seconds).plan == search.allocate(by_params).plan


@pytest.mark.parametrize("name", SEARCHES)
def test_a_layer_that_no_rank_makes_smaller(name):
    """One input: even a single component costs more than the layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24))
    batches = [(torch.randn(16, 1), torch.randint(24, (16,)))]
    result = facts.compress(model, batches, search=QUICK.get(name, name), ratio=0.7, layers=["0", "2"])
    assert result.summary.spent["flops"] <= result.summary.budget["flops"]
    assert result.plan["2"] is not None


@pytest.mark.parametrize("name", ["cors", "cors_fisher", "flar", *QUICK])
def test_networks_of_tokens(name):
    """Inputs `[N, T, d]`, to a module that takes nothing else."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = nn.Linear(16, 16), nn.Linear(16, 12)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, tokens):
            x = self.into(tokens)
            return self.out(self.attention(x, x, x, need_weights=False)[0].mean(dim=1))

    torch.manual_seed(0)
    batches = [(torch.randn(16, 5, 16), torch.randint(12, (16,)))]
    result = facts.compress(Attention(), batches, search=QUICK.get(name, name), layers=["into", "out"], ratio=0.7)
    into, out = 2 * 5 * 16 * 16, 2 * 16 * 12
    assert result.summary.budget == {"flops": 7 * (into + out) // 10}
    assert result.summary.spent["flops"] <= result.summary.budget["flops"]


@pytest.mark.parametrize("ratios", [(0.3,), (0.3, 0.33)])
def test_cors_offers_the_measured_ranks_where_no_multiple_lies_between(ratios):
    """At ratios so close together, of 48 components 14 (and 15) are measured, and 8 and 16 are the next multiples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 192), nn.Tanh(), nn.Linear(192, 64))
    batches = [(torch.randn(16, 64), torch.randint(64, (16,)))]
    result = facts.compress(model, batches, search=CoRS(ratios=ratios), ratio=0.5, form="plain")
    assert set(result.plan.values()) <= {14, 15}


def test_ranks_on_offer():
    assert candidate_ranks(38, 345, 8, at_least=5) == list(range(40, 345, 8))  # 768 x 768
    assert len(candidate_ranks(57, 518, 8, at_least=5)) == 57  # 2304 x 768
    assert candidate_ranks(1, 14, 8, at_least=5) == [2, 4, 6, 8, 10, 12, 14]
    assert candidate_ranks(1, 4, 8, at_least=5) == [1, 2, 3, 4]
    assert candidate_ranks(1, 1, 8, at_least=5) == [1]


def test_ranks_between_measured_ones():
    assert ranks_between([10, 20], 4) == [10, 12, 14, 16, 18, 20]
    assert ranks_between([1, 4, 7], 20) == [1, 2, 3, 4, 5, 6, 7]  # there are no more
    assert ranks_between([5], 20) == [5]


def test_cors_offers_so_many_ranks_between_measured_ones():
    """Of 21 components 2, 6, 10, 14 and 18 are measured; with one point between, 4, 8, 12 and 16 come beside them."""
    plan = CoRS(points_between=1).allocate(wide_problem(bounds={"flops": 0.6})).plan
    assert set(plan.values()) - {None} <= set(range(2, 19, 2))


def test_ratios_are_taken_as_they_are_written():
    """0.7 of 10 is 7, though the nearest float to it is less."""
    layer = nn.Linear(10, 1, bias=False)
    problem = facts.search.AllocationProblem(layer, {"": layer}, {}, {"params": 0.7}, rows={"": 1})
    assert problem.budget == (7,)
