"""`facts.compress` end to end on a small network: results, defaults, an untouched original, and refusals."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import facts
from facts.estimators import ASVD, FACTS, GFWSVD
from facts.moments.losses import SampledLabels, summed_cross_entropy
from facts.parts.layers import select_layers
from facts.search import Uniform
from tests.networks import LAYERS, UNIFORM, compress_on_all, image_batches, make_model, relative_error, same_weights


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

    def test_plain_layers_in_half_precision(self, model, batches):
        half = facts.compress(model, batches, ratio=0.6, execution=facts.Execution(torch.bfloat16))
        assert half.summary.form == "plain"
        assert facts.compress(make_model(torch.bfloat16), estimator="pela", ratio=0.6).summary.form == "plain"


class OnlyFirst(nn.Module):
    """`second` never runs and `ignored` has no influence."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.ignored = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x):
        self.ignored(x)
        return self.first(x)


def nan_for_one(outputs, targets):
    return summed_cross_entropy(outputs, targets) * (math.nan if len(targets) == 1 else 1.0)


class TestRefusals:
    """Arguments that are wrong by themselves are in `tests/attacks`."""

    DATA = ((torch.randn(3, 12), torch.tensor([0, 1, 2])),)

    def test_without_data(self, model):
        with pytest.raises(ValueError, match="give calibration or sensitivity data"):
            facts.compress(facts.prepare(model, input_shape=(3, 8, 8)), estimator="pela", search="cors")
        with pytest.raises(ValueError, match="the calibration data is empty"):
            facts.compress(model, iter(()))

    def test_shapes_of_factors(self):
        inputs, grads = torch.zeros(3, 4, 5), torch.zeros(3, 4, 2)
        with pytest.raises(ValueError, match=r"inputs \[3, 4, 5\] and output_grads \[3, 5, 2\] may differ only"):
            facts.estimate_factors("facts", inputs, torch.zeros(3, 5, 2))
        with pytest.raises(ValueError, match=r"the weight must be \[d_out, d_in\] = \[2, 5\], got \[5, 2\]"):
            facts.estimate_factors("facts", inputs, grads, torch.zeros(5, 2))

    def test_layers_that_the_loss_does_not_reach(self):
        for name in ("facts", "svd_llm"):
            with pytest.raises(ValueError, match="layers that never ran on the calibration data: second; leave them"):
                facts.compress(OnlyFirst(), self.DATA, estimator=name, layers=["first", "second"])
        with pytest.raises(ValueError, match="layer ignored ran, but the loss does not depend on it"):
            facts.compress(OnlyFirst(), self.DATA, layers=["first", "ignored"], **UNIFORM)
        result = facts.compress(OnlyFirst(), self.DATA, layers=["first", "ignored"], estimator="svd_llm", **UNIFORM)
        assert result.plan == {"first": 3, "ignored": 3}

    def test_values_that_are_not_finite(self, model, batches):
        with pytest.raises(ValueError, match="in the output gradients of layer vector, in calibration batch 2"):
            compress_on_all(model, batches, loss=nan_for_one)
        overflowing = [(1e25 * images, labels) for images, labels in batches]
        with pytest.raises(ValueError, match="layer grid cannot be decomposed by SVDLLM: the factor holds NaN"):
            facts.compress(model, overflowing, estimator="svd_llm")
        batches[1][0][2, 0, 0, 0] = math.inf
        with pytest.raises(ValueError, match="in the activations of layer grid, in calibration batch 1"):
            facts.compress(model, batches)
        model.tokens.weight.data[0, 0] = math.nan
        with pytest.raises(ValueError, match="layer tokens cannot be decomposed by PELA"):
            facts.compress(model, estimator="pela")


class Autoencoder(nn.Module):
    """Multiplies by a weight and, in a function, by the same one transposed."""

    def __init__(self):
        super().__init__()
        self.code, self.middle, self.last = nn.Linear(12, 40), nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x):
        return self.last(self.middle(F.linear(torch.relu(self.code(x)), self.code.weight.t())))


class Listed(nn.Module):
    """Runs its layers from a list that PyTorch does not know of."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(12, 40), nn.Linear(40, 12), nn.Linear(12, 4)
        self.order = [self.first, nn.ReLU(), self.second]

    def forward(self, x):
        for layer in self.order:
            x = layer(x)
        return self.last(x)


FEW = ((torch.randn(16, 12), torch.arange(16) % 4),)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda model: facts.compress(Autoencoder(), FEW, ratio=0.5),
            "by its plan: its code reads `.weight` of layers",
        ),
        (lambda model: facts.compress(Listed(), FEW), "first: it is also in a plain list or mapping"),
        (lambda model: facts.compress(model, FEW, budget=1e9), r"budget= takes facts.Budget\(flops=.+ got 1000000000"),
        (lambda model: facts.compress(model, FEW, execution="folder"), r"execution= takes facts.Execution\(cache="),
        (lambda model: facts.compress(model, FEW, parts=()), "parts must be one of layers, units, tokens"),
        (lambda model: facts.compress(model, FEW, loss="mse"), "loss is a function of the outputs and targets"),
        (lambda model: facts.compress(model, FEW, loss=lambda out, labels: 0.0), "the loss must be one number"),
        (lambda model: facts.compress(model, FEW[0][0][:3], budget=facts.Budget(error=0.1)), "give at least 4 samples"),
        (lambda model: facts.Execution(timing=5), "timing of an execution must be TimingPolicy, got 5"),
        (lambda model: facts.prepare(model, FEW, protected="1"), "protected is the number of tokens at the front"),
        (lambda model: facts.prepare(model, input_shape=224), "input_shape is an image's"),
        (lambda model: facts.pareto(model, len), "pareto needs what facts.prepare returns, got Sequential"),
        (lambda model: facts.pareto(facts.prepare(model, FEW), len, ratios=0.5), "estimators, searches and ratios are"),
        (lambda model: facts.pareto(facts.prepare(model, FEW), len, ratios=()), "there is nothing to compare"),
        (lambda model: facts.set_tokens(facts.compress(model, FEW), {}), "set_tokens needs a network"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_line(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call(nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 12), nn.Linear(12, 4)))
    assert "\n" not in str(caught.value)


def test_a_generous_latency_beside_another_bound_changes_nothing(model, batches):
    plans = [facts.compress(model, batches, ratio=0.5, budget=facts.Budget(latency_ms=ms)).plan for ms in (None, 1e5)]
    assert plans[0] == plans[1]


class Counted(torch.utils.data.Dataset):
    """Images that count how often one is read."""

    reads = 0

    def __len__(self):
        return 3000

    def __getitem__(self, place):
        self.reads += 1
        return torch.full((3, 8, 8), place / 3000, dtype=torch.float64), place % 4


def test_data_are_read_about_once():
    data = Counted()
    facts.compress(make_model(), data, ratio=0.8)
    assert len(data) < data.reads < 1.4 * len(data)


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
