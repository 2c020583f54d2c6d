"""Forms of low-rank layers through a whole compression."""

import pytest

import facts
from tests.networks import LAYERS


@pytest.mark.parametrize(("search", "cost"), [("uniform", "flops"), ("memvit", "flops"), ("cors", "params")])
def test_searches_meet_the_budget_with_pivoted_layers(model, batches, search, cost):
    result = facts.compress(model, batches, search=search, form="pivoted", ratio=0.6, cost=cost)
    summary = result.summary
    assert 0.4 * summary.budget[cost] < summary.spent[cost] <= summary.budget[cost]
    assert facts.count_cost(result.model, (3, 8, 8)) == summary.after
    assert (summary.form, "pivoted" in str(summary)) == ("pivoted", True)
    assert 0 <= summary.rounding < 1e-5
    dense = dict(model.named_modules())
    spent = sum(
        layer.num_weights if isinstance(layer := result.model.get_submodule(name), facts.PivotedLinear)
        else dense[name].weight.numel()
        for name in LAYERS
    )  # fmt: skip
    assert cost == "flops" or spent == summary.spent["params"]
