import math

import pytest
import torch
from torch import nn

import facts
from facts.calibration.data import FirstSamples
from facts.calibration.selection import select_layers
from facts.estimators import ASVD, ESTIMATORS, FACTS
from facts.search import Uniform
from tests.networks import LAYERS, UNIFORM, image_batches, make_model, relative_error


def snapshot(model):
    """Everything about a model that compression must leave alone."""
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "grads": [parameter.grad for parameter in model.parameters()],
        "flags": [parameter.requires_grad for parameter in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "types": [type(module) for module in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()],
    }


def assert_untouched(model, before):
    after = snapshot(model)
    for name, tensor in before.pop("weights").items():
        assert tensor.equal(after["weights"][name]), name
    del after["weights"]
    assert before == after


class TestResult:
    @pytest.mark.parametrize("name", ESTIMATORS)
    def test_every_estimator_meets_the_budget(self, model, batches, name):
        result = facts.compress(model, batches, estimator=name, ratio=0.5, **UNIFORM)
        assert list(result.plan) == list(LAYERS)
        before = after = 0
        for layer, rank in result.plan.items():
            dense, small = model.get_submodule(layer), result.model.get_submodule(layer)
            assert isinstance(small, facts.LowRankLinear)
            assert small.rank == rank
            assert (small.bias is None) == (dense.bias is None)
            assert dense.bias is None or small.bias.equal(dense.bias) == (name != "aafm")
            before += dense.weight.numel()
            after += small.left.numel() + small.right.numel()
        assert after <= 0.5 * before
        assert result.summary.before.params - result.summary.after.params == before - after
        assert result.summary.after == facts.count_cost(result.model, (3, 8, 8))
        stages = {"reading", "preparation", "decomposition", "search", "latency", "comparison"}
        assert result.summary.seconds.keys() - {"calibration"} == stages  # PELA needs no pass
        assert result.model(batches[0][0]).shape == (3, 4)

    @pytest.mark.parametrize("name", ESTIMATORS)
    def test_ratio_one_leaves_everything_dense(self, model, batches, name):
        result = facts.compress(model, batches, estimator=name, ratio=1)
        assert result.plan == dict.fromkeys(LAYERS)
        assert result.summary.before == result.summary.after
        assert result.model is not model
        for images, _ in batches:
            assert result.model(images).equal(model(images))

    def test_a_larger_ratio_is_a_smaller_error(self, batches):
        """In the metric that is minimised, and close to the network itself at the largest rank."""
        model, images = make_model(torch.float32), batches[0][0]
        errors = [
            relative_error(facts.compress(model, batches, estimator="svd_llm", ratio=r).model(images), model(images))
            for r in (0.3, 0.95)
        ]
        assert errors[1] < errors[0]

    def test_weights_are_the_decomposition(self, model, batches):
        """What `compress` does is what its parts do when called one by one."""
        estimator = FACTS()
        result = facts.compress(model, batches, estimator=estimator, ratio=0.5, **UNIFORM)
        moments = facts.moments.collect_moments(model, select_layers(model).layers, batches, estimator.moments)
        for name, rank in result.plan.items():
            factors = estimator.factors(moments[name])
            left, right = facts.low_rank_factors(model.get_submodule(name).weight, factors, rank, 0.7, 0.1)
            small = result.model.get_submodule(name)
            assert relative_error(small.weight, left @ right) < 1e-5  # float32

    def test_names_and_instances_are_the_same(self, model, batches):
        first = facts.compress(model, batches, estimator="asvd", search="uniform")
        second = facts.compress(model, batches, estimator=ASVD(), search=Uniform())
        assert first.plan == second.plan
        assert first.model(batches[0][0]).equal(second.model(batches[0][0]))

    def test_named_layers(self, model, batches):
        result = facts.compress(model, batches, layers=["tokens", "head"], **UNIFORM)
        assert list(result.plan) == ["tokens", "head"]
        assert isinstance(result.model.head, facts.LowRankLinear)
        assert isinstance(result.model.grid, nn.Linear)

    def test_no_data_for_a_method_without_data(self, model):
        result = facts.compress(model, estimator="pela")
        assert result.summary.before.flops is None
        assert result.summary.after.params < result.summary.before.params
        assert facts.compress(model, estimator="pela", input_shape=(3, 8, 8)).summary.before.flops > 0

    @pytest.mark.parametrize("name", ["facts", "svd_llm"])
    def test_one_shot_generator(self, model, batches, name):
        expected = facts.compress(model, batches, estimator=name)
        result = facts.compress(model, (batch for batch in batches), estimator=name)
        assert result.summary.before == expected.summary.before
        assert result.model(batches[0][0]).equal(expected.model(batches[0][0]))

    def test_bfloat16_pass(self, model, batches):
        """Half a percent a rounding moves the network by a few percent at most; the weights stay float32."""
        images = batches[0][0]
        exact = facts.compress(model, batches, ratio=0.8).model(images)
        result = facts.compress(model, batches, ratio=0.8, precision=torch.bfloat16)
        assert {parameter.dtype for parameter in result.model.parameters()} == {torch.float32}
        assert 0 < relative_error(result.model(images), exact) < 0.05

    def test_repairs_are_counted_by_layer(self, model, batches):
        """One sample leaves SVD-LLM's factor of `vector` with rank one; the summary says so."""
        result = facts.compress(model, [(batches[0][0][:1], batches[0][1][:1])], estimator="svd_llm")
        assert result.summary.repaired["vector"] == 1
        assert facts.compress(model, batches, estimator="facts").summary.repaired == {}

    @pytest.mark.parametrize("cost", ["flops", "params"])
    def test_both_costs(self, model, batches, cost):
        assert (
            facts.compress(model, batches, cost=cost, estimator="pela", **UNIFORM).plan["tokens"] == 2
        )  # 12 * 10 // 22 // 2


class TestOriginalIsUntouched:
    @pytest.fixture
    def model(self):
        model = make_model(torch.float32).train()
        model.grid.eval()
        model.tokens.requires_grad_(False)
        return model

    @pytest.mark.parametrize("name", ["facts", "svd_llm", "pela"])
    def test_after_success(self, model, batches, name):
        before = snapshot(model)
        result = facts.compress(model, batches, estimator=name)
        for parameter in result.model.parameters():
            parameter.data.add_(1)
        assert_untouched(model, before)

    @pytest.mark.parametrize("name", ["facts", "svd_llm"])
    def test_after_an_error_in_the_middle_of_the_pass(self, model, batches, name):
        before = snapshot(model)
        broken = [*batches[:2], (torch.zeros(2, 5), batches[2][1])]
        with pytest.raises(RuntimeError):
            facts.compress(model, broken, estimator=name)
        assert_untouched(model, before)

    def test_after_an_error_in_the_backward_pass(self, model, batches):
        before = snapshot(model)

        class Failing(torch.autograd.Function):
            @staticmethod
            def forward(ctx, logits):
                return logits.sum()

            @staticmethod
            def backward(ctx, grad):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            facts.compress(model, batches, loss=lambda outputs, targets: Failing.apply(outputs))
        assert_untouched(model, before)


class OnlyFirst(nn.Module):
    """`second` never runs and `ignored` has no influence."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.ignored = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x):
        self.ignored(x)
        return self.first(x)


class TestBadInput:
    def test_unknown_estimator(self, model, batches):
        with pytest.raises(ValueError, match=r"unknown estimator 'fact'; choose one of aafm, .*, svd_llm"):
            facts.compress(model, batches, estimator="fact")

    def test_unknown_search(self, model, batches):
        with pytest.raises(ValueError, match=r"unknown search 'greedy'; choose one of asvd, .*, uniform"):
            facts.compress(model, batches, search="greedy")

    @pytest.mark.parametrize("budget", [{"ratio": 1.1}, {"cost": "macs"}, {"bounds": {"params": 2}}], ids=str)
    def test_budget(self, model, batches, budget):
        """What else can be wrong with one is in `test_budget.py`."""
        with pytest.raises(ValueError, match=r"must lie in \(0, 1\], got|cost must be one of"):
            facts.compress(model, batches, **budget)

    def test_a_search_that_compares_outputs_without_data(self, model):
        with pytest.raises(ValueError, match="give calibration or sensitivity data"):
            facts.compress(model, estimator="pela", search="cors", input_shape=(3, 8, 8))

    def test_no_calibration(self, model):
        with pytest.raises(ValueError, match="FACTS needs calibration data"):
            facts.compress(model)

    @pytest.mark.parametrize("empty", [list, lambda: iter(())], ids=["list", "generator"])
    def test_empty_calibration(self, model, empty):
        with pytest.raises(ValueError, match="the calibration data is empty"):
            facts.compress(model, empty())

    @pytest.mark.parametrize("name", ["facts", "svd_llm"])
    def test_layer_that_never_ran(self, name):
        data = [(torch.randn(3, 12), torch.tensor([0, 1, 2]))]
        with pytest.raises(ValueError, match="layers that never ran on the calibration data: second; leave them out"):
            facts.compress(OnlyFirst(), data, estimator=name, layers=["first", "second"])

    def test_layer_the_loss_does_not_depend_on(self):
        data = [(torch.randn(3, 12), torch.tensor([0, 1, 2]))]
        with pytest.raises(ValueError, match="layer ignored ran, but the loss does not depend on it"):
            facts.compress(OnlyFirst(), data, layers=["first", "ignored"], **UNIFORM)
        result = facts.compress(OnlyFirst(), data, layers=["first", "ignored"], estimator="svd_llm", **UNIFORM)
        assert result.plan == {"first": 3, "ignored": 3}

    @pytest.mark.parametrize("name", ["facts", "svd_llm"])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_nan_in_activations(self, model, batches, name, value):
        batches[1][0][2, 0, 0, 0] = value
        with pytest.raises(ValueError, match="in the activations of layer grid, in calibration batch 1"):
            facts.compress(model, batches, estimator=name)

    def test_nan_in_gradients(self, model, batches):
        """The activations are fine; the loss is not."""

        def loss(outputs, targets):
            return facts.moments.losses.summed_cross_entropy(outputs, targets) * (
                math.nan if len(targets) == 1 else 1.0
            )

        with pytest.raises(ValueError, match="in the output gradients of layer vector, in calibration batch 2"):
            facts.compress(model, batches, loss=loss)

    def test_nan_in_the_weights_of_a_method_without_data(self, model):
        model.tokens.weight.data[0, 0] = math.nan
        with pytest.raises(ValueError, match="layer tokens cannot be decomposed by PELA"):
            facts.compress(model, estimator="pela")

    def test_factor_that_is_not_finite_names_the_layer(self, model, batches):
        """Finite activations whose squares overflow."""
        overflowing = [(1e25 * images, labels) for images, labels in batches]
        with pytest.raises(ValueError, match="layer grid cannot be decomposed by SVDLLM: the factor holds NaN"):
            facts.compress(model, overflowing, estimator="svd_llm")

    def test_tensor_that_cannot_be_split_into_samples(self):
        class Mixing(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(12, 12)

            def forward(self, x):
                return self.fc(x[:-1].sum(dim=0, keepdim=True).expand(5, 12))[: len(x)]

        data = [(torch.randn(3, 12), torch.tensor([0, 1, 2]))]
        with pytest.raises(ValueError, match=r"layer fc sees a tensor of shape \[5, 12\] for a batch of 3 samples"):
            facts.compress(Mixing(), data, layers=["fc"])

    @pytest.mark.parametrize(
        ("inputs", "grads", "weight", "message"),
        [
            ((3, 4, 5), (3, 5, 2), None, r"inputs \[3, 4, 5\] and output_grads \[3, 5, 2\] must agree"),
            ((3, 4, 5), (3, 4, 2), (5, 2), r"the weight must be \[d_out, d_in\] = \[2, 5\], got \[5, 2\]"),
        ],
    )
    def test_shapes_of_estimate_factors(self, inputs, grads, weight, message):
        weight = None if weight is None else torch.zeros(weight)
        with pytest.raises(ValueError, match=message):
            facts.estimate_factors("facts", torch.zeros(inputs), torch.zeros(grads), weight)

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("facts", {"shrinkage_row": 1.5}),
            ("facts", {"grad_clip": 0}),
            ("facts", {"normalize": "layer"}),
            ("facts", {"shrinkage": 0.1}),
            ("gfwsvd", {"group_size": 0}),
            ("gfwsvd", {"store": "tape"}),
            ("asvd", {"alpha": -1}),
            ("flar", {"covariance_shrinkage": "oas"}),
            ("fwsvd", {"exponent": "two"}),
        ],
    )
    def test_options_out_of_range(self, name, options):
        with pytest.raises(ValueError, match=next(iter(options))):
            ESTIMATORS[name](**options)


def test_outputs_are_compared_on_the_first_samples_unless_data_are_given():
    batches = image_batches([200, 200, 200, 200], dtype=torch.float32)
    first = FirstSamples(batches, num_samples=512)
    assert [len(labels) for _, labels in first] == [200, 200, 200]
    assert next(iter(first))[0] is batches[0][0]  # again from the start
