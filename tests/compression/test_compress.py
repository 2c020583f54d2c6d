"""`facts.compress` end to end on a small network: results, defaults, an untouched original, and refusals."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import facts
from facts.estimators import ASVD, FACTS, GFWSVD
from facts.moments.losses import SampledLabels, summed_cross_entropy
from facts.parts.layers import select_layers
from facts.search import Uniform
from tests.networks import LAYERS, UNIFORM, compress_on_all, image_batches, make_model, relative_error, same_weights
from tests.refusals import refused, refuses
from tests.toys import Net, linears


class TestResult:
    @pytest.mark.parametrize("name", ["facts", "svd_llm", "pela"])
    def test_an_estimator_meets_the_budget(self, model, batches, name):
        result = facts.compress(model, batches, estimator=name, ratio=0.5, **UNIFORM)
        assert list(result.plan) == list(LAYERS)
        before = after = 0
        for layer, rank in result.plan.items():
            dense, small = model.get_submodule(layer), result.model.get_submodule(layer)
            assert isinstance(small, facts.LowRankLinear)
            assert small.rank == rank
            assert (small.bias is None) == (dense.bias is None)
            assert dense.bias is None or small.bias.equal(dense.bias)
            before += dense.weight.numel()
            after += small.left.numel() + small.right.numel()
        assert after <= 0.5 * before
        assert result.summary.before.params - result.summary.after.params == before - after
        assert result.summary.after == facts.count_cost(result.model, (3, 8, 8))
        stages = {"reading", "preparation", "decomposition", "search", "latency", "comparison"}
        assert result.summary.seconds.keys() - {"calibration"} == stages  # PELA needs no pass
        assert result.model(batches[0][0]).shape == (3, 4)

    def test_ratio_one_leaves_everything_dense(self, model, batches):
        result = facts.compress(model, batches, ratio=1)
        assert result.plan == dict.fromkeys(LAYERS)
        assert result.summary.before == result.summary.after
        assert result.model is not model
        for images, _ in batches:
            assert result.model(images).equal(model(images))

    def test_weights_are_the_decomposition(self, model, batches):
        """`compress` gives what its parts give when called one by one."""
        estimator = FACTS()
        result = compress_on_all(model, batches, estimator=estimator, ratio=0.5, **UNIFORM)
        moments = facts.moments.collect_moments(model, select_layers(model).layers, batches, estimator.moments)
        for name, rank in result.plan.items():
            factors = estimator.factors(moments[name])
            left, right = facts.low_rank_factors(model.get_submodule(name).weight, factors, rank, 0.7, 0.1)
            small = result.model.get_submodule(name)
            assert relative_error(small.weight, left @ right) < 1e-5  # float32

    def test_names_instances_and_prepared_networks_are_the_same(self, model, batches):
        first = facts.compress(model, batches, estimator="asvd", search="uniform")
        generator = (batch for batch in batches)
        second = facts.compress(facts.prepare(model, generator), estimator=ASVD(), search=Uniform())
        assert first.plan == second.plan and first.summary.before == second.summary.before
        assert first.model(batches[0][0]).equal(second.model(batches[0][0]))

    def test_bfloat16_pass(self, model, batches):
        """Half a percent a rounding moves the network by a few percent at most; the weights stay float32."""
        images = batches[0][0]
        exact = facts.compress(model, batches, ratio=0.8).model(images)
        result = facts.compress(model, batches, ratio=0.8, execution=facts.Execution(torch.bfloat16))
        assert {parameter.dtype for parameter in result.model.parameters()} == {torch.float32}
        assert 0 < relative_error(result.model(images), exact) < 0.05
        half = facts.compress(make_model(torch.bfloat16), estimator="pela", ratio=0.6)
        assert result.summary.form == half.summary.form == "plain"

    def test_a_callers_autocast_changes_nothing(self):
        """Neither the pass nor the choice of pivots."""
        batches = image_batches([8, 8], dtype=torch.float32)
        expected = facts.compress(make_model(torch.float32), batches).model
        with torch.autocast("cpu", torch.bfloat16):
            found = facts.compress(make_model(torch.float32), batches).model
        assert same_weights(found, expected)

    def test_repairs_are_counted_by_layer(self, model, batches):
        """One sample leaves SVD-LLM's factor of `vector` with rank one."""
        result = facts.compress(model, [(batches[0][0][:1], batches[0][1][:1])], estimator="svd_llm")
        assert result.summary.repaired["vector"] == 1
        assert facts.compress(model, batches, estimator="facts").summary.repaired == {}


def own_loss(outputs, targets):
    return outputs.square().sum()


class TestDefaults:
    def test_facts_cors_fisher_and_pivoted_layers(self, model, batches):
        summary = facts.compress(model, batches).summary
        assert summary.estimator.startswith("FACTS(") and summary.form == "pivoted"
        assert summary.search.startswith("CoRSFisher(") and "labels='sampled'" in summary.search
        assert facts.compress(model, estimator="pela").summary.search.startswith("Uniform(")

    @pytest.mark.parametrize(
        ("loss", "labels"),
        [(own_loss, "given"), (summed_cross_entropy, "given"), (SampledLabels(summed_cross_entropy), "sampled")],
    )
    def test_a_search_draws_labels_unless_the_loss_takes_those_given(self, model, batches, loss, labels):
        result = facts.compress(model, batches, loss=loss, ratio=0.6)
        assert f"labels='{labels}'" in result.summary.search


def only_first(**options):
    """Compress a network in which `second` never runs and `ignored` has no influence."""
    network = Net(lambda net, x: (net.first(x), net.ignored(x))[0], **linears("first", "second", "ignored"))
    return facts.compress(network, [(torch.randn(3, 12), torch.tensor([0, 1, 2]))], **options)


def nan_for_one(outputs, targets):
    return summed_cross_entropy(outputs, targets) * (math.nan if len(targets) == 1 else 1.0)


def test_layers_that_the_loss_does_not_reach(model):
    for name in ("facts", "svd_llm"):
        message = "layers that never ran on the calibration data: second; leave them"
        refuses(message, only_first, estimator=name, layers=["first", "second"])
    message = "layer ignored ran, but the loss does not depend on it"
    refuses(message, only_first, layers=["first", "ignored"], **UNIFORM)
    prepared = facts.prepare(model, input_shape=(3, 8, 8))
    refuses("give calibration or sensitivity data", facts.compress, prepared, estimator="pela", search="cors")
    result = only_first(layers=["first", "ignored"], estimator="svd_llm", **UNIFORM)
    assert result.plan == {"first": 3, "ignored": 3}


def test_values_that_are_not_finite(model, batches):
    with pytest.raises(ValueError, match="in the output gradients of layer vector, in calibration batch 2"):
        compress_on_all(model, batches, loss=nan_for_one)
    overflowing = [(1e25 * images, labels) for images, labels in batches]
    with pytest.raises(ValueError, match="layer grid cannot be decomposed by SVDLLM: the factor holds NaN"):
        facts.compress(model, overflowing, estimator="svd_llm")
    batches[1][0][2, 0, 0, 0] = math.inf
    refuses("in the activations of layer grid, in calibration batch 1", facts.compress, model, batches)
    model.tokens.weight.data[0, 0] = math.nan
    refuses("layer tokens cannot be decomposed by PELA", facts.compress, model, estimator="pela")


def autoencoder():
    """Multiplies by a weight and, in a function, by the same one transposed."""

    def run(net, x):
        return net.last(net.middle(F.linear(torch.relu(net.code(x)), net.code.weight.t())))

    return Net(run, code=nn.Linear(12, 40), middle=nn.Linear(12, 12), last=nn.Linear(12, 4))


def listed():
    """Runs its layers from a list that PyTorch does not know of."""
    net = Net(lambda net, x: net.last(net.order[1](net.order[0](x))), first=nn.Linear(12, 40), last=nn.Linear(40, 4))
    net.order = [net.first, nn.ReLU()]
    return net


FEW = ((torch.randn(16, 12), torch.arange(16) % 4),)


def small():
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 12), nn.Linear(12, 4))


def compress(data=FEW, **options):
    return facts.compress(small(), data, **options)


test_what_cannot_be_meant_is_refused_in_a_line = refused(
    (lambda: facts.compress(autoencoder(), FEW, ratio=0.5), "by its plan: its code reads `.weight` of layers"),
    (lambda: facts.compress(listed(), FEW), "first: it is also in a plain list or mapping"),
    (lambda: compress(budget=1e9), r"budget= takes facts.Budget\(flops=.+ got 1000000000"),
    (lambda: compress(execution="folder"), r"execution= takes facts.Execution\(cache="),
    (lambda: compress(parts=()), "parts must be one of layers, units, tokens"),
    (lambda: compress(loss="mse"), "loss is a function of the outputs and targets"),
    (lambda: compress(loss=lambda out, labels: 0.0), "the loss must be one number"),
    (lambda: compress(FEW[0][0][:3], budget=facts.Budget(error=0.1)), "give at least 4 samples"),
    (lambda: compress(iter(())), "the calibration data is empty"),
    (lambda: facts.Execution(timing=5), "timing of an execution must be TimingPolicy, got 5"),
    (lambda: facts.prepare(small(), FEW, protected="1"), "protected is the number of tokens at the front"),
    (lambda: facts.prepare(small(), input_shape=224), "input_shape is an image's"),
    (lambda: facts.pareto(small(), len), "pareto needs what facts.prepare returns, got Sequential"),
    (lambda: facts.pareto(facts.prepare(small(), FEW), len, ratios=0.5), "estimators, searches and ratios are"),
    (lambda: facts.pareto(facts.prepare(small(), FEW), len, ratios=()), "there is nothing to compare"),
    (lambda: facts.set_tokens(compress(), {}), "set_tokens needs a network"),
)


def test_shapes_of_factors():
    inputs, grads, call = torch.zeros(3, 4, 5), torch.zeros(3, 4, 2), facts.estimate_factors
    message = r"inputs \[3, 4, 5\] and output_grads \[3, 5, 2\] may differ only"
    refuses(message, call, "facts", inputs, torch.zeros(3, 5, 2))
    message = r"the weight must be \[d_out, d_in\] = \[2, 5\], got \[5, 2\]"
    refuses(message, call, "facts", inputs, grads, torch.zeros(5, 2))


def test_a_generous_latency_beside_another_bound_changes_nothing(model, batches):
    plans = [facts.compress(model, batches, ratio=0.5, budget=facts.Budget(latency_ms=ms)).plan for ms in (None, 1e5)]
    assert plans[0] == plans[1]


class Counted(TensorDataset):
    """Counts the samples that are read."""

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
    for name in LAYERS:
        assert torch.equal(first[name].left, second[name].left)
        assert torch.equal(first[name].energies, second[name].energies)


def test_every_layer_is_accounted_for_and_so_is_a_budget_that_is_left():
    """Three samples give a layer of 256 outputs no use for a rank above 24, so that another can stay dense."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    result = facts.compress(network, [torch.randn(3, 64)], ratio=0.5, layers=["0", "2"])
    text = str(result)
    assert result.plan["0"] is None and "left whole: 0 (the search kept them)" in text
    kept = result.summary.spent["flops"] / result.summary.budget["flops"]
    assert kept < 0.9 and "no larger plan that fits is predicted to be closer; more samples may tell" in text
