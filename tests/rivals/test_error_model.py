"""LEMS and ASVD+: errors by the formula, and plans against all others."""

import itertools
import math

import numpy as np
import pytest
import torch

import facts
from experiments.rivals.error_model import block_weights
from experiments.rivals.search.asvd_plus import ASVDPlusSearch
from experiments.rivals.search.lems import LEMSSearch
from facts.decomposition.apply import apply_plan
from facts.estimators import SVDLLM
from facts.search import AllocationProblem
from tests.networks import make_causal_lm
from tests.oracles.truncation import discarded_energies
from tests.search.test_searches import plans_of_all_cuts, wide_problem


def divergence(problem, plan, temperature):
    """The mean over samples of KL(p ‖ q) at a temperature, of a plan's network."""
    network, total = apply_plan(problem.model, problem.decompositions, plan, problem.form), []
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


def test_asvd_plus_takes_the_best_cut_through_the_modelled_errors():
    problem = wide_problem(bounds={"flops": 0.7})
    result = ASVDPlusSearch(rank_multiple=4).allocate(problem)
    assert all(min(errors) == 8 for errors in result.profile.values())  # at least 0.3 of 21
    plans = list(plans_of_all_cuts(problem, result.profile))
    assert result.plan == [plan for plan in plans if problem.fits(plan)][-1]


def test_in_language_models_the_bias_of_the_nearest_outputs_is_taken():
    tokens = torch.randint(64, (6, 7), generator=torch.Generator().manual_seed(0))
    calibration = facts.prepare(make_causal_lm("qwen2"), [(tokens, facts.next_tokens(tokens))], held_out=())
    problem = AllocationProblem(
        calibration, SVDLLM(), calibration.decompositions(SVDLLM()), {"flops": 0.6}, sensitivity=calibration.data
    )
    search = LEMSSearch(rank_multiple=4)
    plans = [LEMSSearch(rank_multiple=4, num_trials=number).allocate(problem).plan for number in range(1, 11)]
    errors = [search.divergence(problem, plan) for plan in plans]
    assert errors == sorted(errors, reverse=True) and errors[-1] < errors[0]  # of more draws the best is no worse
    assert search.allocate(problem).plan == plans[-1]


def test_early_blocks_weigh_more():
    sums = [sum((k + 1) ** -0.5 for k in range(b, 3)) for b in range(3)]
    expected = [1 + 2 * (each - sums[2]) / (sums[0] - sums[2]) for each in sums]
    assert np.allclose(block_weights(3, decay=0.5, bias=2), expected) and block_weights(1, 0.5, 2) == 1
