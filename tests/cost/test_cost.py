"""Counts against the paper's; timing by turns; latency as a cost, on a clock that every multiplication moves."""

import time
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import facts
from facts.compression.plan import compress_prepared
from facts.cost.count import count_params
from facts.cost.timing import LatencyTable, Timing, TimingPolicy, batch_seconds, module_seconds
from facts.estimators import PELA
from facts.models import MambaVisionModel, TimmModel
from facts.parts import part_at, put
from facts.search import AllocationProblem, Uniform
from tests.networks import UNIFORM
from tests.toys import Net

QUICK = facts.Execution(timing=TimingPolicy(num_turns=2, min_seconds=0))
BATCHES = [(torch.randn(16, 64), torch.randint(32, (16,)))]
TANH = 1000.0
IMAGE = (3, 224, 224)
of_timm = partial(TimmModel, weights="random")
# The network, the number of its layers, and GFLOPs: dense, and at 60, 50 and 40 % (readings of the paper).
PUBLISHED = {
    "DeiT-B distilled": (of_timm(tag="deit_base_distilled_patch16_224"), 48, ("33.89", "20.41", "17.07", "13.68")),
    "DeiT-B plain": (of_timm(tag="deit_base_patch16_224"), 48, ("33.72", "20.30", "16.98", "13.61")),
    "Swin-B": (of_timm(tag="swin_base_patch4_window7_224"), 96, ("30.30", "18.40", "15.47", "12.47")),
    "ConvNeXt-B": (of_timm(tag="convnext_base"), 72, ("30.75", "18.85", "15.90", "12.92")),
    "MambaVision-B": (MambaVisionModel(variant="B", weights="random"), None, ("29.94", "23.15", "21.47", "19.77")),
}


@pytest.fixture
def clock(monkeypatch):
    """One second for each number of a weight that an input meets, `TANH` for each activation.

    `together` is how much longer low-rank layers take in a network timed as a whole.
    """
    clock, factor = SimpleNamespace(seconds=0.0, together=1.0), [1.0]

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
    for kind in (facts.LowRankLinear, facts.PivotedLinear):
        ticking(kind, lambda layer: factor[0] * layer.num_weights)
    ticking(nn.Tanh, lambda _: TANH)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.seconds)
    monkeypatch.setattr("facts.cost.timing.batch_seconds", batch_seconds)
    return clock


def make_model():
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))


def make_table():
    model = make_model()
    parts = {name: part_at(model, name, "layers") for name in ("0", "2", "4")}
    return LatencyTable(model, parts, lambda network, plan: put(network, parts, plan), torch.randn(4, 64))


def test_times_of_the_network_and_of_its_layers(clock):
    table = make_table()
    assert table.dense == 4 * (64 * 64 * 2 + 64 * 32 + 2 * TANH) and table.rest == 4 * 2 * TANH
    for name, d_out in (("0", 64), ("2", 64), ("4", 32)):
        assert table.seconds(name, None) == 4 * 64 * d_out
        for rank in (1, 3, 8, 13, 16):  # measured ranks and others
            assert table.seconds(name, rank) == pytest.approx(4 * rank * (64 + d_out))


@pytest.mark.parametrize(
    ("search", "bounds"), [("uniform", {}), ("uniform", {"params": 0.6}), ("cors", {"params": 0.6}), ("asvd", {})]
)
def test_a_latency_budget_is_kept_and_spent(clock, search, bounds):
    """The share is that of the whole network, whose activations take as long as before."""
    options = {"ratio": 0.7, "cost": "latency", "bounds": bounds, "execution": QUICK}
    result = facts.compress(make_model(), BATCHES, search=search, **options)
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
    assert len(searches) == num_searches and 0.85 * found["allowed"] < found["predicted"] <= found["allowed"]
    assert found["measured"] == pytest.approx(found["predicted"], rel=0.02)


@pytest.mark.parametrize(("seconds", "factor"), [(0, 0.5), (10**9, 2)])
def test_a_wild_stopwatch_changes_little(clock, seconds, factor):
    table = make_table()
    plan = dict.fromkeys(table.parts, 8)
    before = table.predicted(plan)
    table.correct(plan, seconds)
    assert table.predicted(plan) - table.rest == pytest.approx(factor * (before - table.rest))


def test_median_spread_and_ratio_of_turns():
    """In the last turn of the ratio the machine slows down tenfold, and both with it."""
    timing = Timing((1.0, 2.0, 3.0, 4.0, 100.0))
    assert timing.median == 3 and timing.spread == pytest.approx((4 - 2) / 3)
    assert Timing((2.0, 2.0, 20.0)).ratio(Timing((1.0, 1.0, 10.0))) == 2
    assert Timing((1.0, 3.0, 4.0)).ratio(Timing((1.0, 1.0, 1.0))) == 3


def test_what_runs_on_a_second_gpu_is_timed_there(monkeypatch):
    entered, left = [], []

    @contextmanager
    def device_of(tensor):
        entered.append(tensor)
        yield
        left.append(tensor)

    model, images = make_model(), torch.randn(4, 64)
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    model.register_forward_hook(lambda *_: entered.append(len(left)))
    batch_seconds({"own": model}, images, TimingPolicy(num_warmups=0, num_turns=2, min_seconds=0))
    module_seconds(model, [""], images)
    assert entered[0] is entered[3] is next(model.parameters()) and entered[1:3] == [0, 0] and entered[4] == 1


def test_functions_take_turns():
    calls = []
    policy = TimingPolicy(num_turns=3, min_seconds=0)
    found = policy.times({name: partial(calls.append, name) for name in "ab"})
    assert {name: len(timing.seconds) for name, timing in found.items()} == {"a": 3, "b": 3}
    assert "".join(calls) == "abababab"  # once to warm up, then three times
    calls.clear()
    replace(policy, min_seconds=0.001).times({name: partial(calls.append, name) for name in "ab"})
    turns = [name for name, before in zip(calls, [None, *calls], strict=False) if name != before]
    assert "".join(turns) == "abababab" and len(calls) > 100
    (timing,) = TimingPolicy(num_turns=2, min_seconds=0).times({"sleep": partial(time.sleep, 0.02)}).values()
    assert min(timing.seconds) >= 0.02


@cache
def built(name):
    with torch.device("meta"):
        return PUBLISHED[name][0].build()


@pytest.mark.external
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_gflops(name):
    """By what plans save; one of them by counting what its network does."""
    _, num_layers, gflops = PUBLISHED[name]
    prepared = facts.prepare(built(name), input_shape=IMAGE, form="plain")
    assert num_layers in (len(prepared.parts), None)
    problems = [AllocationProblem(prepared, PELA(), {}, {"flops": ratio}) for ratio in (0.6, 0.5, 0.4)]
    saved = [problem.dense[0] - problem.spent(Uniform().allocate(problem).plan)[0] for problem in problems]
    assert tuple(f"{(prepared.flops - each) / 1e9:.2f}" for each in (0, *saved)) == gflops
    result = compress_prepared(prepared, PELA(), Uniform(), facts.Budget.of(0.5))
    assert facts.count_cost(result.model, IMAGE).flops == result.summary.after.flops == prepared.flops - saved[1]


def test_published_parameters():
    """Those of MambaVision are with its other tests."""
    assert f"{count_params(built('DeiT-B distilled')) / 1e6:.1f}" == "87.3"


def test_full_rule_adds_attention_and_mambavisions_mixing_and_nothing_else():
    attention = 5 * 4 * 196**2 * 512 + 2 * 4 * 49**2 * 1024  # blocks, products, tokens, width
    convolutions = 5 * 2 * 2 * 3 * 196 * 256 + 3 * 2 * 2 * 3 * 49 * 512  # mixers, branches, operations, taps, ...
    scan = 5 * 9 * 8 * 196 * 256 + 3 * 9 * 8 * 49 * 512  # mixers, operations, states, tokens, channels
    stem_norms = 4 * (64 * 112**2 + 128 * 56**2)
    added = {"DeiT-B plain": 2 * 2 * 197**2 * 768 * 12}  # QKᵀ and AV: tokens, width, blocks
    added["MambaVision-B"] = attention + convolutions + scan + stem_norms
    for name, expected in added.items():
        paper, full = (facts.count_cost(built(name), IMAGE, rule).flops for rule in ("paper", "full"))
        assert full - paper == expected


def test_by_hand():
    stem = nn.Conv2d(3, 8, 2, stride=2, bias=False)  # 4 x 4 maps
    model = nn.Sequential(stem, nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(2), nn.LayerNorm(16), nn.Linear(16, 5))
    products = 2 * 16 * 8 * (3 * 2 * 2) + 2 * 8 * 16 * 5
    elementwise = (4 + 1 + 5) * 8 * 16
    params = 3 * 8 * 4 + 2 * 8 + 2 * 16 + 16 * 5 + 5
    for rule in ("paper", "full"):
        assert facts.count_cost(model, (3, 8, 8), rule) == facts.Cost(flops=products + elementwise, params=params)


def cost_of(compute):
    """Of ten vectors through `layer` alone, computed in one of several ways."""
    return facts.count_cost(Net(lambda net, x: compute(net.layer, x), layer=nn.Linear(16, 24)), (10, 16))


@pytest.mark.parametrize(
    "compute",
    [
        lambda layer, x: F.linear(x, layer.weight, layer.bias),
        lambda layer, x: x @ layer.weight.T + layer.bias,
        lambda layer, x: torch.einsum("nd,md->nm", x, layer.weight.view(24, 16)),
        lambda layer, x: F.linear(x, torch.cat([layer.weight[:8], layer.weight[8:]])),
        lambda layer, x: torch.baddbmm(layer.bias, x[None], layer.weight.T.expand(1, -1, -1)),
        lambda layer, x: torch.stack([layer.weight @ row for row in x]),
        lambda layer, x: F.bilinear(x, x[:, :1], layer.weight[..., None]),
        lambda layer, x: F.conv2d(x[..., None, None], layer.weight[..., None, None], layer.bias),
    ],
)
def test_a_product_through_a_function_counts_as_the_layers(compute):
    expected = cost_of(nn.Linear.__call__)
    assert cost_of(compute) == expected and expected.flops == 2 * 10 * 16 * 24
    assert cost_of(lambda layer, x: layer(x) @ layer(x).mT).flops == 2 * expected.flops  # the paper leaves out mixing


def test_equal_networks_cost_the_same():
    """But for the normalisation of the stem, which the paper leaves out and torchvision names differently."""
    with torch.device("meta"):
        pair = timm.create_model("swin_tiny_patch4_window7_224"), torchvision.models.swin_t()
    one, other = (facts.count_cost(each, IMAGE).flops for each in pair)
    assert other - one == 5 * 56**2 * 96
