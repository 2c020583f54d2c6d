"""Measured latency as a cost: on a clock that every multiplication of a linear layer moves, so that times are exact."""

import time

import pytest
import torch
from torch import nn

import facts
from facts.cost.latency import LatencyTable
from facts.cost.timing import Timing, TimingPolicy
from facts.modules.forms import PivotedLinear
from facts.modules.lowrank import LowRankLinear
from facts.parts import part_at, put
from facts.search import Uniform
from tests.networks import UNIFORM

QUICK = facts.Execution(timing=TimingPolicy(num_turns=2, min_seconds=0))
BATCHES = [(torch.randn(16, 64), torch.randint(32, (16,)))]
TANH = 1000.0


class Clock:
    """Seconds that have passed; `together` is how much longer low-rank layers take in a network timed as a whole."""

    seconds, together = 0.0, 1.0


@pytest.fixture
def clock(monkeypatch):
    """One second for each number of a weight that an input meets, `TANH` for each activation."""
    clock, factor = Clock(), [1.0]

    def ticking(kind, seconds):
        forward = kind.forward

        def counted(self, x):
            clock.seconds += seconds(self) * len(x)
            return forward(self, x)

        monkeypatch.setattr(kind, "forward", counted)

    def batch_seconds(networks, inputs, timing, precision):
        times, factor[0] = {}, clock.together
        for name, network in networks.items():
            start = clock.seconds
            network(inputs)
            times[name] = Timing((clock.seconds - start,) * 2)
        factor[0] = 1.0
        return times

    ticking(nn.Linear, lambda layer: layer.weight.numel())
    for kind in (LowRankLinear, PivotedLinear):
        ticking(kind, lambda layer: factor[0] * layer.num_weights)
    ticking(nn.Tanh, lambda _: TANH)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.seconds)
    monkeypatch.setattr("facts.cost.latency.batch_seconds", batch_seconds)
    return clock


def make_model():
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))


def make_table(model, inputs):
    parts = {
        name: part_at(model, name, "layers") for name, layer in model.named_modules() if isinstance(layer, nn.Linear)
    }
    return LatencyTable(model, parts, lambda network, plan: put(network, parts, plan), inputs)


def test_times_of_the_network_and_of_its_layers(clock):
    table = make_table(make_model(), torch.randn(4, 64))
    assert table.dense == 4 * (64 * 64 * 2 + 64 * 32 + 2 * TANH)
    assert table.rest == 4 * 2 * TANH
    for name, d_out in (("0", 64), ("2", 64), ("4", 32)):
        assert table.seconds(name, None) == 4 * 64 * d_out
        for rank in (1, 3, 8, 13, 16):  # measured ranks and others
            assert table.seconds(name, rank) == pytest.approx(4 * rank * (64 + d_out))


@pytest.mark.parametrize("search", ["uniform", "cors", "asvd"])
@pytest.mark.parametrize("bounds", [{}, {"params": 0.6}])
def test_a_latency_budget_is_kept_and_spent(clock, search, bounds):
    """The share is that of the whole network, whose activations take as long as before."""
    result = facts.compress(
        make_model(), BATCHES, search=search, ratio=0.7, cost="latency", bounds=bounds, execution=QUICK
    )
    found = result.summary.latency
    assert found["allowed"] == 0.7 * found["dense"]
    assert found["predicted"] <= found["allowed"] and (bounds or 0.9 * found["allowed"] < found["predicted"])
    assert found["measured"] == pytest.approx(found["predicted"])
    for cost in ("latency", *bounds):
        assert 0 < result.summary.spent[cost] <= result.summary.budget[cost]


@pytest.mark.parametrize(("together", "num_searches"), [(1.0, 1), (1.01, 1), (1.2, 2), (0.8, 2)])
def test_a_network_slower_or_faster_than_predicted_corrects_the_table(clock, monkeypatch, together, num_searches):
    searches = []
    allocate = Uniform.allocate
    monkeypatch.setattr(Uniform, "allocate", lambda *args: searches.append(args) or allocate(*args))
    clock.together = together
    found = facts.compress(make_model(), BATCHES, ratio=0.7, cost="latency", execution=QUICK, **UNIFORM).summary.latency
    assert len(searches) == num_searches
    assert 0.85 * found["allowed"] < found["predicted"] <= found["allowed"]
    assert found["measured"] == pytest.approx(found["predicted"], rel=0.02)


@pytest.mark.parametrize(("seconds", "factor"), [(0, 0.5), (10**9, 2)])
def test_a_wild_stopwatch_changes_little(clock, seconds, factor):
    table = make_table(make_model(), torch.randn(4, 64))
    plan = dict.fromkeys(table.parts, 8)
    before = table.predicted(plan)
    table.correct(plan, seconds)
    assert table.predicted(plan) - table.rest == pytest.approx(factor * (before - table.rest))


def test_noise_of_the_given_shape_where_there_is_no_data(clock):
    settings = {"estimator": "pela", "ratio": 0.7, "cost": "latency"}
    prepared = facts.prepare(make_model(), input_shape=(5, 64), execution=QUICK)
    found = facts.compress(prepared, **settings).summary.latency
    assert found["dense"] == 5 * (64 * 64 * 2 + 64 * 32 + 2 * TANH)
    with pytest.raises(ValueError, match="latency is measured on a batch: give calibration data or input_shape"):
        facts.compress(make_model(), **settings)


def test_a_budget_below_what_no_layer_can_change(clock):
    settings = {"cost": "latency", "execution": QUICK, "layers": ["0", "2", "4"]}
    for search in ("cors", "uniform"):
        with pytest.raises(ValueError, match=r"outside the layers to compress: .* ms, a ratio of 0.1, cannot be met"):
            facts.compress(make_model(), BATCHES, search=search, ratio=0.1, **settings)
    with pytest.raises(ValueError, match="no allocation costs as little as the budget"):
        facts.compress(make_model(), BATCHES, search="cors", ratio=0.17, **settings)
