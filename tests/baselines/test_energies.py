"""LEMS: errors by the formula, and plans against all others. FastLRD: one component after another."""

import itertools
import math

import pytest
import torch
from torch import nn

from experiments.baselines.energies import FastLRDSearch, LEMSSearch
from tests.oracles.truncation import discarded_energies
from tests.search.problems import plain_problem
from tests.search.test_searches import wide_problem


def divergence(problem, plan, temperature):
    """The mean over samples of KL(p ‖ q) at a temperature, of a plan's network."""
    network, total = problem.calibration.apply(plan, problem.decompositions), []
    for x, _ in problem.sensitivity:
        p, q = (torch.log_softmax(each(x) / temperature, dim=-1) for each in (problem.model, network))
        total.append((p.exp() * (p - q)).sum(dim=-1))
    return torch.cat(total).mean().item()


def test_errors_follow_the_energy_that_is_lost():
    """From the divergence at a tenth of the cost, rank 2 of 21."""
    problem = wide_problem(bounds={"flops": 0.6})
    model = LEMSSearch(rank_multiple=4, temperature=0.5)
    for name, errors in model.errors(problem).items():
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
