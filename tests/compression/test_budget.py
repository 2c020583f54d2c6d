"""Budgets as fractions of the layers, or as figures of the whole network."""

import math

import pytest

import facts
from facts.compression.budget import Budget, ratio_of_layers
from facts.cost.timing import TimingPolicy


def test_a_half_unless_something_else_is_given():
    assert Budget.of() == Budget({"flops": 0.5}, {})
    assert Budget.of(cost="params") == Budget({"params": 0.5}, {})
    assert Budget.of(bounds={"params": 0.6}) == Budget({"params": 0.6}, {})
    assert Budget.of(latency_ms=100) == Budget({}, {"latency": 0.1})
    assert Budget.of(0.3, "flops", {"params": 0.6}, latency_ms=100) == Budget(
        {"flops": 0.3, "params": 0.6}, {"latency": 0.1}
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"ratio": 0.5, "bounds": {"flops": 0.6}},
            r"flops is bounded twice, by ratio=0.5 and by bounds=\{'flops': 0.6\}",
        ),
        ({"ratio": 0.5, "cost": "bytes"}, "cost must be one of flops, params, latency, got 'bytes'"),
        *(
            ({"ratio": ratio}, rf"must lie in \(0, 1\], got {ratio} for flops")
            for ratio in (0, 1.2, -1, math.nan, math.inf)
        ),
        ({"bounds": {"params": 0}}, r"must lie in \(0, 1\], got 0 for params"),
        ({"ratio": 0.5, "flops": 1e9}, r"flops is bounded twice, by a ratio of 0.5 and by 1e\+09: give it once"),
        ({"params": -3}, "params of the whole network must be a positive number, got -3"),
        ({"params": math.nan}, "must be a positive number, got nan"),
    ],
)
def test_what_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        Budget.of(**arguments)


@pytest.mark.parametrize("name", ["flops", "params"])
@pytest.mark.parametrize("share", [0.6, 0.75, 0.9, 0.999])
def test_figures_of_the_whole_network_are_kept_to(model, batches, name, share):
    """And used up: one rank more, in any layer, would be too much."""
    whole = getattr(facts.count_cost(model, (3, 8, 8)), name)
    allowed = round(share * whole)
    result = facts.compress(model, batches, search="cors", **{name: allowed})
    assert getattr(result.summary.after, name) <= allowed
    assert 0 <= result.summary.budget[name] - (allowed - (whole - sum_of_layers(result, name))) + 1 <= 1.001


def sum_of_layers(result, name):
    """What the layers cost dense, from the summary alone."""
    before, after = getattr(result.summary.before, name), getattr(result.summary.after, name)
    return before - (after - result.summary.spent[name])


def test_several_figures_at_once(model, batches):
    cost = facts.count_cost(model, (3, 8, 8))
    after = facts.compress(model, batches, flops=0.9 * cost.flops, params=0.7 * cost.params).summary.after
    assert after.flops <= 0.9 * cost.flops
    assert after.params <= 0.7 * cost.params


def test_more_than_the_network_costs_leaves_it_as_it_is(model, batches):
    result = facts.compress(model, batches, params=10**9)
    assert set(result.plan.values()) == {None}
    assert result.summary.after == result.summary.before


def test_latency_of_the_whole_network(model, batches):
    """A limit far above what it takes changes nothing, one far below cannot be met, whatever the machine does."""
    timing = TimingPolicy(num_turns=2, min_seconds=0)
    assert set(facts.compress(model, batches, latency_ms=1e6, timing=timing).plan.values()) == {None}
    with pytest.raises(ValueError, match="cannot be met; allow more than that"):
        facts.compress(model, batches, latency_ms=1e-6, timing=timing)


def test_less_than_the_rest_of_the_network_takes(model, batches):
    with pytest.raises(
        ValueError, match=r"params of 5 cannot be met: of the network's \d+ only \d+ are those of the layers"
    ):
        facts.compress(model, batches, params=5)


def test_flops_that_nobody_knows(model):
    with pytest.raises(ValueError, match="the network's FLOPs are not known: give input_shape"):
        facts.compress(model, estimator="pela", flops=1000)


def test_ratio_of_layers_never_rounds_up():
    for allowed in range(101, 200):
        assert 100 + ratio_of_layers("params", allowed, 200, 100) * 100 <= allowed
    assert ratio_of_layers("params", 200, 200, 100) == 1
