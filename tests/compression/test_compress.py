"""`facts.compress` and `facts.pareto` end to end on small networks: results, defaults, budgets, and refusals."""

import logging
import math
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import facts
from facts import Budget
from facts.estimators import ASVD, FACTS, GFWSVD
from facts.moments.losses import SampledLabels, summed_cross_entropy
from facts.parts.layers import select_layers
from facts.search import Uniform
from tests.networks import LAYERS, UNIFORM, image_batches, make_model, make_vit, relative_error, same_weights
from tests.refusals import refused, refuses
from tests.toys import Net, linears

SAMPLED = SampledLabels(summed_cross_entropy)
METHODS = {"estimators": ("facts", "svd_llm", "pela"), "searches": ("uniform",), "ratios": (0.4, 0.7)}
PASSED = []  # batches that went through with gradients: those of data passes


@pytest.fixture
def model():
    return make_model(torch.float32)


@pytest.fixture
def batches():
    return image_batches([3, 3, 1], dtype=torch.float32)


@pytest.mark.parametrize("name", ["facts", "svd_llm", "pela"])
def test_an_estimator_meets_the_budget(model, batches, name):
    result = facts.compress(model, batches, estimator=name, ratio=0.5, **UNIFORM)
    for layer, rank in result.plan.items():
        dense, small = model.get_submodule(layer), result.model.get_submodule(layer)
        assert isinstance(small, facts.LowRankLinear) and small.rank == rank
        assert small.bias is dense.bias is None or small.bias.equal(dense.bias)
    assert result.summary.spent["flops"] <= result.summary.budget["flops"]
    assert result.summary.after == facts.count_cost(result.model, (3, 8, 8))
    stages = {"reading", "preparation", "decomposition", "search", "latency", "comparison"}
    assert result.summary.seconds.keys() - {"calibration"} == stages  # PELA needs no pass


def test_ratio_one_leaves_everything_dense(model, batches):
    result = facts.compress(model, batches, ratio=1)
    assert result.plan == dict.fromkeys(LAYERS) and result.summary.before == result.summary.after
    assert result.model is not model and same_weights(result.model, model)


def test_weights_are_the_decomposition(model, batches):
    """`compress` gives what its parts give when called one by one."""
    estimator = FACTS()
    result = facts.compress(facts.prepare(model, batches, held_out=()), estimator=estimator, ratio=0.5, **UNIFORM)
    moments = facts.moments.collect_moments(model, select_layers(model).layers, batches, estimator.moments)
    for name, rank in result.plan.items():
        factors = estimator.factors(moments[name])
        left, right = facts.low_rank_factors(model.get_submodule(name).weight, factors, rank, 0.7, 0.1)
        assert relative_error(result.model.get_submodule(name).weight, left @ right) < 1e-5  # float32


def test_names_instances_and_prepared_networks_are_the_same(model, batches):
    first = facts.compress(model, batches, estimator="asvd", search="uniform")
    second = facts.compress(facts.prepare(model, (each for each in batches)), estimator=ASVD(), search=Uniform())
    assert first.summary.before == second.summary.before and same_weights(first.model, second.model)


def test_bfloat16_pass(model, batches):
    """Half a percent a rounding moves the network by a few percent at most; the weights stay float32."""
    images = batches[0][0]
    result = facts.compress(model, batches, ratio=0.8, execution=facts.Execution(torch.bfloat16))
    assert {parameter.dtype for parameter in result.model.parameters()} == {torch.float32}
    assert 0 < relative_error(result.model(images), facts.compress(model, batches, ratio=0.8).model(images)) < 0.05
    half = facts.compress(make_model(torch.bfloat16), estimator="pela", ratio=0.6)
    assert result.summary.form == half.summary.form == "plain"


def test_a_callers_autocast_changes_nothing(model):
    """Neither the pass nor the choice of pivots."""
    batches = image_batches([8, 8], dtype=torch.float32)
    expected = facts.compress(model, batches).model
    with torch.autocast("cpu", torch.bfloat16):
        assert same_weights(facts.compress(model, batches).model, expected)


def test_repairs_are_counted_by_layer(model, batches):
    """One sample leaves SVD-LLM's factor of `vector` with rank one."""
    result = facts.compress(model, [(batches[0][0][:1], batches[0][1][:1])], estimator="svd_llm")
    assert result.summary.repaired["vector"] == 1
    assert facts.compress(model, batches, estimator="facts").summary.repaired == {}


def own_loss(outputs, targets):
    return outputs.square().sum()


@pytest.mark.parametrize(
    ("loss", "labels"), [(None, "sampled"), (own_loss, "given"), (summed_cross_entropy, "given"), (SAMPLED, "sampled")]
)
def test_facts_and_a_search_that_draws_labels_unless_the_loss_takes_those_given(model, batches, loss, labels):
    summary = facts.compress(model, batches, loss=loss).summary
    assert summary.estimator.startswith("FACTS(") and summary.form == "pivoted"
    assert summary.search.startswith("CoRSFisher(") and f"labels='{labels}'" in summary.search
    assert facts.compress(model, estimator="pela").summary.search.startswith("Uniform(")


def only_first(other, **options):
    """Compress another layer than the first, too, where `second` never runs and `ignored` has no influence."""
    network = Net(lambda net, x: (net.first(x), net.ignored(x))[0], **linears("first", "second", "ignored"))
    data = [(torch.randn(3, 12), torch.tensor([0, 1, 2]))]
    return facts.compress(network, data, layers=["first", other], **UNIFORM, **options)


def test_layers_that_the_loss_does_not_reach():
    for by in ("facts", "svd_llm"):
        refuses("layers that never ran on the calibration data: second; leave them", only_first, "second", estimator=by)
    refuses("layer ignored ran, but the loss does not depend on it", only_first, "ignored")
    assert only_first("ignored", estimator="svd_llm").plan == {"first": 3, "ignored": 3}


def test_values_that_are_not_finite(model, batches):
    def nan_for_one(outputs, targets):
        return summed_cross_entropy(outputs, targets) * (math.nan if len(targets) == 1 else 1.0)

    with pytest.raises(ValueError, match="in the output gradients of layer vector, in calibration batch 2"):
        facts.compress(facts.prepare(model, batches, held_out=(), loss=nan_for_one))
    with pytest.raises(ValueError, match="layer grid cannot be decomposed by SVDLLM: the factor holds NaN"):
        facts.compress(model, [(1e25 * images, labels) for images, labels in batches], estimator="svd_llm")
    batches[1][0][2, 0, 0, 0] = math.inf
    refuses("in the activations of layer grid, in calibration batch 1", facts.compress, model, batches)
    model.tokens.weight.data[0, 0] = math.nan
    refuses("layer tokens cannot be decomposed by PELA", facts.compress, model, estimator="pela")


def autoencoder(net, x):
    """Multiply by a weight and, in a function, by the same one transposed."""
    return net.second(net.third(F.linear(torch.relu(net.first(x)), net.first.weight.t())))


def listed():
    """Runs a layer from a list that PyTorch does not know of."""
    net = Net(lambda net, x: net.second(net.order[0](x)), **linears("first", "second"))
    net.order = [net.first]
    return net


AUTOENCODER, ROWS = Net(autoencoder, **linears("first", "second", "third")), [torch.randn(16, 12)]
IMAGES, SVD_LLM = image_batches([16, 16], shape=(3, 16, 16)), {"estimator": "svd_llm", **UNIFORM}
CLOSE, NO_DATA = Budget(error=0.1), {"data": None, "estimator": "pela"}


def compress(budget=None, data=IMAGES, **options):
    return facts.compress(make_vit(depth=1), data, budget=budget, **options)


test_what_cannot_be_meant_is_refused_in_a_line = refused(
    (lambda: facts.compress(AUTOENCODER, ROWS), "by its plan: its code reads `.weight` of layers"),
    (lambda: facts.compress(listed(), ROWS), "first: it is also in a plain list or mapping"),
    (lambda: Budget.of(0.5, bounds={"flops": 0.6}), "flops is bounded twice, by ratio=0.5 and by 0.6"),
    (lambda: Budget.of(0.5, "bytes"), "cost must be one of flops, params, latency, got 'bytes'"),
    (lambda: Budget.of(True), r"must lie in \(0, 1\], got True for flops"),
    (lambda: Budget(flops=1e9).with_ratios(0.5), "flops is bounded twice, by a ratio and by a limit"),
    (lambda: Budget(error=math.nan), "the error of a budget must be a positive number, got nan"),
    (lambda: CLOSE.with_ratios(0.5), "a bound on the error replaces all others"),
    (lambda: compress(CLOSE, cost="latency"), 'choose cost="flops" or "params", not latency'),
    (lambda: compress(CLOSE, image_batches([3], shape=(3, 16, 16))), "there are too few: give at least 4 samples"),
    (lambda: compress(Budget(error=1e-12), **SVD_LLM), "even with 99% of the flops, on .* an error of more than 1e-12"),
    (lambda: compress(CLOSE, **NO_DATA), "error compares outputs on calibration data: give some, or a ratio"),
    (lambda: compress(Budget(params=5)), r"params of 5 cannot be met: of the network's \d+, only \d+ belong to"),
    (lambda: compress(Budget(latency_ms=1e-6)), "cannot be met; allow more than that"),
    (lambda: compress(Budget(flops=1e3), **NO_DATA), r"FLOPs are unknown: give calibration data, facts\.prepare"),
    (lambda: compress(budget=1e9), r"budget= takes facts.Budget\(flops=.+ got 1000000000"),
    (lambda: compress(execution="folder"), r"execution= takes facts.Execution\(cache="),
    (lambda: compress(parts="unit"), "parts must be one of layers, units, tokens, or several, got 'unit'"),
    (lambda: compress(loss="mse"), "loss is a function of the outputs and targets"),
    (lambda: compress(loss=lambda out, labels: 0.0), "the loss must be one number"),
    (lambda: compress(data=iter(())), "the calibration data is empty"),
    (lambda: compress(**NO_DATA, search="cors"), "give calibration or sensitivity data"),
    (lambda: facts.Execution(timing=5), "timing of an execution must be TimingPolicy, got 5"),
    (lambda: facts.prepare(make_vit(), IMAGES, protected="1"), "protected is the number of tokens at the front"),
    (lambda: facts.prepare(make_vit(), input_shape=224), "input_shape is an image's"),
    (lambda: facts.pareto(make_vit(), len), "pareto needs what facts.prepare returns, got VisionTransformer"),
    (lambda: facts.pareto(facts.prepare(make_vit(), IMAGES), len, ratios=0.5), "estimators, searches and ratios are"),
    (lambda: facts.pareto(facts.prepare(make_vit(), IMAGES), len, ratios=()), "there is nothing to compare"),
    (lambda: facts.set_tokens(compress(), {}), "set_tokens needs a network"),
)


test_shapes_of_factors = refused(
    ([(3, 4, 5), (3, 5, 2)], r"inputs \[3, 4, 5\] and output_grads \[3, 5, 2\] may differ only"),
    ([(3, 4, 5), (3, 4, 2), (5, 2)], r"the weight must be \[d_out, d_in\] = \[2, 5\], got \[5, 2\]"),
    by=lambda shapes: facts.estimate_factors("facts", *map(torch.zeros, shapes)),
)


def test_a_generous_latency_beside_another_bound_changes_nothing(model, batches):
    plans = [facts.compress(model, batches, ratio=0.5, budget=Budget(latency_ms=ms)).plan for ms in (None, 1e5)]
    assert plans[0] == plans[1]


class Counted(TensorDataset):
    num_read = 0

    def __getitem__(self, index):
        self.num_read += 1
        return super().__getitem__(index)


def test_data_are_read_about_once():
    """Of samples that are held out, no other one is read."""
    data = Counted(torch.rand(3000, 3, 8, 8, dtype=torch.float64), torch.arange(3000) % 4)
    facts.compress(make_model(), DataLoader(data, 64, shuffle=True), ratio=0.8)
    assert len(data) < data.num_read < 1.4 * len(data)


def test_of_two_that_decompose_at_once_the_second_waits(tmp_path, monkeypatch):
    """GFWSVD's gradients, which the first deletes, would be missing otherwise."""
    calls, factors, estimator = [], GFWSVD.factors, GFWSVD()
    monkeypatch.setattr(GFWSVD, "factors", lambda self, moments: calls.append(1) or factors(self, moments))
    execution = facts.Execution(cache=tmp_path)
    prepared = [facts.prepare(make_model(), image_batches([3, 3]), execution=execution) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda calibration: calibration.decompositions(estimator), prepared)
    assert len(calls) == len(LAYERS)
    for a, b in ((first[name], second[name]) for name in LAYERS):
        assert a.left.equal(b.left) and a.energies.equal(b.energies)


def test_every_layer_is_accounted_for_and_so_is_a_budget_that_is_left():
    """Three samples give a layer of 256 outputs no use for a rank above 24, so that another can stay dense."""
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    result = facts.compress(network, [torch.randn(3, 64)], ratio=0.5, layers=["0", "2"])
    text = str(result)
    assert result.plan["0"] is None and "left whole: 0 (the search kept them)" in text
    kept = result.summary.spent["flops"] / result.summary.budget["flops"]
    assert kept < 0.9 and "no larger plan that fits is predicted to be closer; more samples may tell" in text


@pytest.fixture
def prepared(model, batches):
    def note(network, args):
        PASSED.extend(args if torch.is_grad_enabled() and not args[0].is_meta else ())

    model.register_forward_pre_hook(note)
    return facts.prepare(model, batches)


def test_each_point_is_what_compress_gives_and_all_share_one_data_pass(prepared, batches, tmp_path):
    @torch.no_grad()  # else it would be counted
    def evaluate(network):
        return {"logit": torch.cat([network(images) for images, _ in batches]).mean().item()}

    PASSED.clear()
    points = facts.pareto(prepared, evaluate, **METHODS, file=tmp_path / "points.csv", form="plain")
    assert len(PASSED) == 2  # the third batch is held out
    found = list(zip(points.estimator, points.search, points.ratio, strict=True))
    assert found == [("original", "original", 1.0), *product(*METHODS.values())]
    assert points.logit[0] == evaluate(prepared.model)["logit"] and points.distance[0] == 0
    for point in points[1:].itertuples():
        method = {"estimator": point.estimator, "search": point.search, "ratio": point.ratio}
        alone = facts.compress(prepared, **method, form="plain")
        assert (point.flops, point.params) == (alone.summary.after.flops, alone.summary.after.params)
        assert point.logit == pytest.approx(evaluate(alone.model)["logit"], abs=1e-5)
        assert point.distance == pytest.approx(alone.summary.distance.mean, rel=1e-3) and point.form == "plain"
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "points.csv"), points, check_dtype=False)


def test_points_are_kept_when_killed_and_failures_left_out(prepared, tmp_path, monkeypatch):
    networks = []

    def killed(network):
        networks.append(network)
        if len(networks) == 4:
            raise KeyboardInterrupt
        return {"number": len(networks)}

    with pytest.raises(KeyboardInterrupt):
        facts.pareto(prepared, killed, **METHODS | {"ratios": (1e-9, 0.4, 0.7)}, file=tmp_path / "points.csv")
    assert pd.read_csv(tmp_path / "points.csv").ratio.tolist() == [1.0, 0.4, 0.7]
    PASSED.clear()
    refuses("no method produced a compressed network", facts.pareto, prepared, killed, ratios=(1e-9,))
    assert not PASSED
    monkeypatch.setattr(type(prepared), "collect", lambda *_: pytest.fail("a data pass"))
    refuses("must lie in", facts.pareto, prepared, killed, ratios=(0.5, 1.5))


def test_a_half_unless_something_else_is_bounded():
    assert Budget.of() == Budget(ratios={"flops": 0.5})
    assert Budget.of(cost="params") == Budget(ratios={"params": 0.5})
    assert Budget.of(bounds={"params": 0.6}) == Budget(ratios={"params": 0.6})
    slow = Budget(latency_ms=8)
    assert slow.with_ratios(None) == slow and slow.limits == {"latency": 0.008}
    assert slow.with_ratios(0.3, "flops", {"params": 0.6}) == Budget(ratios={"flops": 0.3, "params": 0.6}, latency_ms=8)
    assert Budget(error=0.1).with_ratios(None).ratios == {}


@pytest.mark.parametrize("name", ["flops", "params"])
@pytest.mark.parametrize("share", [0.6, 0.999])
def test_limits_of_the_whole_network_are_kept_and_used_up(model, batches, name, share):
    """One rank more, in any layer, would be too much."""
    whole = getattr(facts.count_cost(model, (3, 8, 8)), name)
    allowed = round(share * whole)
    costs = facts.compress(model, batches, search="cors", budget=Budget(**{name: allowed})).summary
    before, after = getattr(costs.before, name), getattr(costs.after, name)
    rest = whole - (before - (after - costs.spent[name]))  # outside the layers
    assert after <= allowed and 0 <= costs.budget[name] - (allowed - rest) + 1 <= 1.001


def test_the_smallest_hundredth_within_an_error_is_found(caplog):
    """Compared with one hundredth less; all 32 samples fit both comparisons. One data pass serves all ratios."""

    def distance_at(ratio):
        return compress(None, ratio=ratio, **SVD_LLM).summary.distance.mean

    error = distance_at(0.5) * 1.001
    caplog.clear()
    with caplog.at_level(logging.INFO):
        summary = compress(Budget(error=error), **SVD_LLM).summary
    assert sum("data pass" in message for message in caplog.messages) == 1
    found, distance = summary.bounds["flops"], summary.distance.mean
    assert distance == pytest.approx(distance_at(found)) and distance <= error and found <= 0.5
    assert distance_at(round(found - 0.01, 2)) > error


def test_ratios_without_a_plan_are_too_small():
    """CoRS has no rank below a tenth of each layer; the bisection goes on above."""
    assert compress(Budget(error=10), search="cors", estimator="svd_llm").summary.bounds["flops"] < 0.5
