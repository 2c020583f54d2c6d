"""Measured latency as a cost."""

import torch
from torch import nn

import facts
from facts.search import CoRS
from facts.search.latency import LayerTimes


def test_times_follow_the_size():
    layers = {"small": nn.Linear(16, 16), "large": nn.Linear(1024, 1024, bias=False)}
    times = LayerTimes(layers, {"small": 256, "large": 256})
    assert times("large", None) > 3 * times("small", None) > 0
    assert times("large", 512) > 3 * times("large", 8) > 0
    assert times("large", None) > 3 * LayerTimes(layers, {"large": 8})("large", None)


def test_each_shape_is_measured_once(monkeypatch):
    layers = {name: nn.Linear(8, 16) for name in ("one", "same", "longer")}
    layers |= {"turned": nn.Linear(16, 8), "plain": nn.Linear(8, 16, bias=False)}
    measured = []

    def measure(layer, rows, rank):
        measured.append((layer.in_features, layer.out_features, layer.bias is not None, rows, rank))
        return float(len(measured))

    monkeypatch.setattr(LayerTimes, "_measure", staticmethod(measure))
    times = LayerTimes(layers, {**dict.fromkeys(layers, 4), "longer": 8})
    for _ in range(2):
        assert [times(name, None) for name in layers] == [1, 1, 2, 3, 4]
        assert [times("same", rank) for rank in (2, 3, None)] == [5, 6, 1]
        assert times("one", 2) == 5
    assert measured == [
        (8, 16, True, 4, None),
        (8, 16, True, 8, None),
        (16, 8, True, 4, None),
        (8, 16, False, 4, None),
        (8, 16, True, 4, 2),
        (8, 16, True, 4, 3),
    ]


def test_a_layer_is_left_as_it_is():
    layer = nn.Linear(16, 16)
    before = [parameter.clone() for parameter in layer.parameters()]
    LayerTimes({"layer": layer}, {"layer": 4})("layer", 2)
    for parameter, old in zip(layer.parameters(), before, strict=True):
        assert parameter.equal(old)
        assert parameter.requires_grad and parameter.grad is None


def test_a_latency_budget_is_kept():
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))
    batches = [(torch.randn(256, 512), torch.randint(10, (256,)))]
    search = CoRS(rank_multiple=64)
    result = facts.compress(model, batches, search=search, ratio=0.7, cost="latency", bounds={"params": 0.8})
    for cost in ("latency", "params"):
        assert 0 < result.summary.spent[cost] <= result.summary.budget[cost]
    assert any(rank is not None for rank in result.plan.values())
