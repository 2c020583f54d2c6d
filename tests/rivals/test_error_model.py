"""LEMS: errors by the formula, and plans against all others."""

import itertools
import math

import pytest
import torch

from experiments.rivals.search.lems import LEMSSearch
from tests.oracles.truncation import discarded_energies
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
