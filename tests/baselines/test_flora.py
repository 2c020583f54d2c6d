"""FLORA: its supernet, its draws, its evolution."""

import itertools
import random

import pytest
import torch

from experiments.baselines.flora import Evolution, FLORASearch, Supernet, offered, within_budget
from facts.modules.networks import replaced_forwards
from tests.networks import image_batches
from tests.search.problems import make_problem

RATIOS = FLORASearch().ratios


@pytest.mark.parametrize("fit_bias", [False, True])
def test_a_supernet_runs_as_the_network_of_any_of_its_plans(fit_bias):
    problem = make_problem("svd_llm", fit_bias=fit_bias)
    supernet = Supernet(problem, offered(problem, RATIOS))
    images, rng = image_batches([4], seed=5)[0][0], random.Random(0)
    original = problem.model(images)
    for _ in range(5):
        plan = {name: rng.choice(ranks) for name, ranks in supernet.choices.items()}
        with replaced_forwards(supernet.forwards()), torch.no_grad():
            outputs, dense = supernet.outputs(images, plan), supernet.outputs(images, {})
        torch.testing.assert_close(outputs, problem.calibration.apply(plan, problem.decompositions)(images))
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
    """Of all plans to which no choice can be added within the budget, by the errors of the untrained supernet."""
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
