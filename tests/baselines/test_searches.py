"""Baselines that search ranks: Dobi-SVD, LEMS, FastLRD and FLORA, each by its rule; and training that goes on."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import facts
from experiments.baselines.dobi_svd import DobiSVDSearch, SmoothTruncation, TruncatedLayer
from experiments.baselines.energies import FastLRDSearch, LEMSSearch
from experiments.baselines.flora import Evolution, FLORASearch, Supernet, offered, within_budget
from facts.modules.networks import replaced_forwards
from facts.search import ComCatSearch
from tests.finetuning.setting import Reads, interrupt
from tests.networks import image_batches, numbered, seen_by
from tests.oracles.fisher import discarded_energies
from tests.search.problems import make_problem, plain_problem
from tests.search.test_searches import wide_problem
from tests.toys import Net, linears

RATIOS = FLORASearch().ratios
COMCAT, DOBI = ComCatSearch(num_epochs=6, learning_rate=0.1), DobiSVDSearch(num_epochs=6)
LONGER = replace(COMCAT, num_epochs=20), DobiSVDSearch(num_epochs=40, learning_rates=(0.01, 0.005))


@pytest.mark.parametrize(
    "values", [[1, 1, 1, 1, 1], [3, 2, 2, 1, 0.5], [3, 2, 1, 1 - 1e-13, 0.5], [3, 2, 0, 0, 0], [0, 0, 0, 0, 0]]
)
def test_the_gradient_is_finite_where_values_tie(values):
    """Where PyTorch's is infinite, NaN or of the size of the inverse difference."""
    vectors, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))
    matrix = (vectors * torch.tensor(values, dtype=torch.float64) @ vectors.mT).requires_grad_()
    shares = torch.tensor([1.0, 0.9, 0.6, 0.2, 0.0], dtype=torch.float64, requires_grad=True)
    outputs = SmoothTruncation.apply(matrix, shares)
    of_matrix, of_shares = torch.autograd.grad((outputs * torch.randn_like(outputs)).sum(), (matrix, shares))
    assert outputs.isfinite().all() and of_shares.isfinite().all()
    assert of_matrix.abs().max() < 100  # terms of the series times the weights


def test_the_gradient_of_the_ranks_is_that_of_finite_differences():
    """Both gradients, of the network's loss and of the cost, at ranks that are not whole."""
    problem, ((images, labels),) = make_problem(), image_batches([8])
    layers = [TruncatedLayer(problem, name, 3.0) for name in problem.layers]

    def loss_and_cost(ranks):
        with replaced_forwards({layer.dense: layer.forward for layer in layers}):
            for layer, rank in zip(layers, ranks, strict=True):
                layer.rank = rank
            loss = problem.prepared.loss(problem.model(images), labels)
        return loss, sum(layer.cost(rank) for layer, rank in zip(layers, ranks, strict=True)) / 1000

    ranks = torch.tensor([2.3, 1.6, 3.1, 4.7, 2.2, 5.4], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss_and_cost, (ranks,), eps=1e-3, atol=5e-9, rtol=1e-3)


def test_the_decompositions_are_projections_with_the_best_outputs_of_their_rank():
    """By Eckart and Young's theorem, for the first layer, which sees the data as they are, in one batch."""
    problem = make_problem(data=image_batches([16]))
    result = DobiSVDSearch(num_epochs=1).allocate(problem)
    assert set(result.plan.values()) != {None} and problem.fits(result.plan)
    for name, layer in problem.layers.items():
        decomposition = result.decompositions[name]
        torch.testing.assert_close(decomposition.left @ decomposition.right, layer.weight.detach())
        if rank := result.plan[name]:
            left, right = decomposition.truncate(rank)
            torch.testing.assert_close(left.mT @ left, torch.eye(rank, dtype=torch.float64))
            torch.testing.assert_close(right, left.mT @ layer.weight.detach())
    rank, seen = result.plan["grid"], seen_by(problem.layers["grid"], problem.model, image_batches([16])[0][0])
    outputs = seen @ problem.layers["grid"].weight.detach().mT
    left, right = result.decompositions["grid"].truncate(rank)
    error = (seen @ (left @ right).mT - outputs).square().sum()
    torch.testing.assert_close(error, torch.linalg.svdvals(outputs)[rank:].square().sum())


def divergence(problem, plan, temperature):
    """The mean over samples of KL(p ‖ q) at a temperature, of a plan's network."""
    network, total = problem.prepared.apply(plan, problem.decompositions), []
    for x, _ in problem.sensitivity:
        p, q = (torch.log_softmax(each(x) / temperature, dim=-1) for each in (problem.model, network))
        total.append((p.exp() * (p - q)).sum(dim=-1))
    return torch.cat(total).mean().item()


def test_errors_follow_the_energy_that_is_lost():
    """From the divergence at a tenth of the cost, rank 2 of 21."""
    problem = wide_problem(bounds={"flops": 0.6})
    for name, errors in LEMSSearch(rank_multiple=4, temperature=0.5).errors(problem).items():
        assert list(errors) == [4, 8, 12, 16]
        measured = divergence(problem, dict.fromkeys(problem.parts) | {name: 2}, temperature=0.5)
        lost = discarded_energies(problem.layers[name].weight.detach(), None, None)
        for rank, error in errors.items():
            assert error == pytest.approx(measured * lost[rank - 1].item() / lost[1].item(), rel=1e-6)


def test_lems_has_the_least_modelled_error_of_all_plans():
    problem = wide_problem(bounds={"flops": 0.5})
    result = LEMSSearch(rank_multiple=4).allocate(problem)
    choices = itertools.product(*([*errors, None] for errors in result.profile.values()))
    plans = [dict(zip(result.profile, ranks, strict=True)) for ranks in choices]

    def total(plan):
        return math.fsum(result.profile[name].get(rank, 0) for name, rank in plan.items())

    assert problem.fits(result.plan)
    assert total(result.plan) == pytest.approx(min(total(plan) for plan in plans if problem.fits(plan)))


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
def test_fastlrd_removes_the_component_of_least_similarity_for_its_cost(ratio):
    """One by one, with the similarity of the matrices themselves."""
    model = nn.Sequential(nn.Linear(24, 72), nn.Linear(40, 40)).double()
    model[1].weight.data *= torch.linspace(0, 1, 40) ** 4
    problem = plain_problem(model, bounds={"params": ratio})
    weights = {name: layer.weight.detach() for name, layer in problem.layers.items()}

    def fall(name, rank):
        pairs = (torch.mm(*problem.decompositions[name].truncate(each)).flatten() for each in (rank, rank - 1))
        high, low = (torch.cosine_similarity(each, weights[name].flatten(), dim=0).item() for each in pairs)
        return (high - low) / sum(weights[name].shape)

    plan = {name: problem.full_rank(name) for name in problem.layers}
    while not problem.fits(plan):
        plan[min(plan, key=lambda name: fall(name, plan[name]))] -= 1
    assert FastLRDSearch().allocate(problem).plan == plan


def test_a_supernet_runs_as_the_network_of_any_of_its_plans():
    problem = make_problem("svd_llm")
    supernet = Supernet(problem, offered(problem, RATIOS))
    images, rng = image_batches([4], seed=5)[0][0], random.Random(0)
    original = problem.model(images)
    for _ in range(5):
        plan = {name: rng.choice(ranks) for name, ranks in supernet.choices.items()}
        with replaced_forwards(supernet.forwards()), torch.no_grad():
            outputs, dense = supernet.outputs(images, plan), supernet.outputs(images, {})
        torch.testing.assert_close(outputs, problem.prepared.apply(plan, problem.decompositions)(images))
        torch.testing.assert_close(dense, original, rtol=0, atol=1e-14)
    assert problem.model(images).equal(original)


def test_no_choice_can_go_up_within_the_budget():
    problem = make_problem(bounds={"flops": 0.5, "params": 0.55})
    choices, rng = offered(problem, RATIOS), random.Random(0)
    plans = set()
    for _ in range(50):
        plan = within_budget(problem, choices, {name: rng.choice(ranks) for name, ranks in choices.items()}, rng)
        assert problem.fits(plan)
        for name, ranks in choices.items():
            assert plan[name] is None or not problem.fits({**plan, name: ranks[ranks.index(plan[name]) + 1]})
        assert within_budget(problem, choices, plan, rng) == plan
        plans.add(tuple(plan.values()))
    assert len(plans) > 25
    lowest = {name: ranks[0] for name, ranks in choices.items()}
    assert within_budget(make_problem(bounds={"flops": 0.01}), choices, plan, random.Random(0)) == lowest


def test_evolution_finds_the_best_plan_of_a_small_space():
    """The best of all plans that can take no more within the budget, by the errors of the untrained supernet."""
    problem = make_problem()
    choices = {name: ranks for name, ranks in offered(problem, RATIOS).items() if name != "vector"}
    dense = dict.fromkeys(problem.layers)
    spent = problem.spent({**dense, "rows": 3, "tokens": 3, "shared": 2})
    problem = make_problem(bounds={"flops": spent[0] / problem.dense[0]})
    supernet = Supernet(problem, choices)
    plans = [{**dense, **dict(zip(choices, ranks, strict=True))} for ranks in itertools.product(*choices.values())]
    full = [plan for plan in plans if within_budget(problem, choices, plan, random.Random(0)) == plan]
    found = {}
    for generations in (1, 40):
        evolution = Evolution(FLORASearch(population=5, num_generations=generations), problem, supernet)
        best = evolution.run()
        assert problem.fits(best)
        found[generations] = evolution.errors[tuple(best.values())]
        assert supernet.errors([best]) == pytest.approx([found[generations]]) == [min(evolution.errors.values())]
        assert len(evolution.errors) <= 5 * generations
    assert found[1] > found[40] == pytest.approx(min(supernet.errors(full)))


@pytest.mark.parametrize(("search", "before", "after"), [(COMCAT, 0, 0), (DOBI, 1, 2)])
def test_training_goes_on_as_if_it_had_not_been_interrupted(search, before, after, tmp_path):
    """The third epoch ends early; of the six of 2 batches each, two need not run again, and then none.

    Of Dobi-SVD, a batch gives the loss's unit, and both make the weights.
    """
    expected = search.allocate(make_problem())

    def batches(reads):
        return numbered(image_batches([8, 8]), reads, "images")

    with pytest.raises(KeyboardInterrupt):
        search.allocate(make_problem(data=batches(Reads(1 + before + 6, interrupt)), cache=tmp_path))
    for count in (8, 0):
        reads = Reads()
        again = search.allocate(make_problem(data=batches(reads), cache=tmp_path))
        assert reads.count == 1 + before + count + after  # the first one is looked at
        assert again.plan == expected.plan and again.solution == expected.solution
        for name, decomposition in (expected.decompositions or {}).items():
            assert again.decompositions[name].left.equal(decomposition.left)


@pytest.mark.parametrize("search", [*LONGER, FLORASearch(num_epochs=2)])
def test_training_moves_ranks_to_the_layer_that_matters(search):
    """The outputs of one of two layers of one shape are all but ignored; the other ends with more of the budget."""

    def fork(net, images):
        x = images.flatten(1)[:, :12]
        return 5 * net.used(x) + 1e-3 * net.ignored(x)

    model, batches = Net(fork, **linears("used", "ignored")), image_batches([32] * 4, dtype=torch.float32)
    batches = [(images, model(images).argmax(dim=1)) for images, _ in batches]
    plan = facts.compress(model, batches, search=search, ratio=0.6).plan
    assert (plan["used"] or 12) > (plan["ignored"] or 12)
