"""Which layers are compressed, and the reason why each of the others is not."""

import copy
import logging
import re

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import facts
from facts.calibration.reasons import reasons_to_skip
from facts.calibration.selection import select_layers
from tests.networks import UNIFORM, image_batches, make_causal_lm, make_model


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Everything(nn.Module):
    """Vectors `[N, 12]`; one layer for each reason."""

    def __init__(self):
        super().__init__()
        self.good = nn.Linear(12, 16)
        self.normaliser = nn.Linear(16, 16)
        self.small = nn.Linear(16, 9)
        self.idle = nn.Linear(16, 16)
        self.read = nn.Linear(9, 16)
        self.of_a_table = nn.Linear(4, 16)
        self.own = Doubling(16, 16)
        self.tied = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.tied.weight
        self.classifier = nn.Linear(16, 10)
        self.register_buffer("table", torch.randn(1, 4))

    def forward(self, x):
        x = self.small(self.normaliser(torch.tanh(self.good(x))))
        x = F.linear(x, self.read.weight, self.read.bias) + self.of_a_table(self.table)
        return self.classifier(self.second(self.tied(self.own(x))))


class Careless(nn.Module):
    """Looks at values, which the meta device does not have."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x):
        scale = 2.0 if x.sum().item() > 0 else 1.0
        return self.head(torch.tanh(self.layer(scale * x)))


@pytest.fixture
def vectors():
    torch.manual_seed(1)
    return [(torch.randn(6, 12), torch.randint(4, (6,))) for _ in range(2)]


class TestReasons:
    def test_each_of_them(self, vectors):
        result = facts.compress(Everything(), vectors)
        assert list(result.plan) == ["good"]
        assert result.skipped == {
            "normaliser": "its name holds `norm`",
            "small": "it has fewer than 10 outputs",
            "idle": "it is never called, and nothing else reads its weight",
            "read": "Everything reads its weight without calling it",
            "of_a_table": "its inputs do not have the samples for their first axis",
            "own": "it is a Doubling, which computes in a way of its own",
            "tied": "it shares its weight with second",
            "second": "it shares its weight with tied",
            "classifier": "its name holds `classifier`",
        }

    def test_layers_that_are_named_are_taken(self, vectors):
        result = facts.compress(Everything(), vectors, layers=["good", "normaliser"])
        assert list(result.plan) == ["good", "normaliser"]
        assert result.skipped["small"] == "it was not named"
        assert len(result.skipped) == 8

    def test_outputs_by_timm_and_transformers(self):
        resnet = timm.create_model("resnet18", num_classes=12)
        assert reasons_to_skip(resnet)["fc"] == "it makes the outputs"
        assert reasons_to_skip(make_causal_lm("gpt2"))["lm_head"] == "it makes the outputs"

    def test_nothing_is_left(self, vectors):
        model = nn.Sequential(nn.Linear(12, 4))
        with pytest.raises(ValueError, match="Sequential has no layer to compress: 0: it has fewer than 10"):
            facts.compress(model, vectors)
        model = Everything()
        for name in ("good", "idle"):
            delattr(model, name)
        model.forward = lambda x: F.linear(x[:, :9], model.read.weight)
        with pytest.raises(ValueError, match=r"Everything has no layer to compress: .*read.*Name the layers"):
            facts.compress(model, vectors)


class TestMeta:
    def test_a_network_that_looks_at_values(self, vectors, caplog):
        """Its FLOPs stay unknown; those of its layers do not."""
        with caplog.at_level(logging.WARNING):
            result = facts.compress(Careless(), vectors, **UNIFORM)
        assert "no FLOPs: Careless does not run on the meta device" in caplog.text
        assert result.summary.before.flops is None
        assert result.summary.budget["flops"] == 2 * 12 * 16 // 2
        assert result.plan["layer"] == 3

    def test_without_data_there_is_no_other_way(self):
        with pytest.raises(RuntimeError, match="meta"):
            facts.compress(Careless(), estimator="pela", input_shape=(1, 12))


def test_rows_of_inputs_by_name(vectors):
    """They count one sample, however many a batch holds."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = make_model(torch.float32)

        def forward(self, inputs):
            return self.network(inputs["images"])

    batches = image_batches([3], dtype=torch.float32)
    named = facts.compress(Named(), [({"images": images}, labels) for images, labels in batches])
    plain = facts.compress(make_model(torch.float32), batches)
    assert named.summary.budget == plain.summary.budget


def test_attention_that_reads_the_weight_of_a_layer_calls_it():
    """BEiT, EVA and SwinV2 add three biases to a product with the weight of `qkv`."""
    tiny = {"img_size": 32, "patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 2, "num_classes": 10}
    model = timm.create_model("beit_base_patch16_224", **tiny).eval()
    images = torch.randn(4, 3, 32, 32)
    before = model(images)
    result = facts.compress(model, [(images, torch.arange(4))], estimator="svd_llm", ratio=0.9)
    assert "blocks.0.attn.qkv" in result.plan
    assert result.summary.after.flops < result.summary.before.flops
    assert model(images).equal(before)
    assert model.blocks[0].attn.qkv_bias_separate is False  # the original is as it was
    assert result.model.blocks[0].attn.qkv_bias_separate is True


def test_a_layer_with_a_forward_of_its_own_that_changes_nothing_is_taken(vectors):
    """As that of OpenMMLab's, which is there for versions of PyTorch long gone."""

    class Logging(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    model = nn.Sequential(Logging(12, 16), nn.Tanh(), nn.Linear(16, 4))
    assert list(facts.compress(model, vectors).plan) == ["0"]


def test_the_last_layer_makes_the_outputs_whatever_its_name(vectors):
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12))
    result = facts.compress(model, vectors)
    assert (list(result.plan), result.skipped) == (["0"], {"2": "it makes the outputs"})
    resnet = torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=12).eval()
    result = facts.compress(resnet, estimator="pela", input_shape=(3, 64, 64))
    assert result.skipped["fc"] == "it makes the outputs"
    assert len(result.plan) == 2 * 4  # 1x1 convolutions, since there is no other linear layer


def test_a_layer_under_two_names_is_replaced_under_both(vectors):
    layer = nn.Linear(12, 12)
    model = nn.Sequential(nn.Sequential(layer, nn.Tanh()), nn.Sequential(layer, nn.Tanh()), nn.Linear(12, 4))
    result = facts.compress(model, vectors, params=150)
    assert result.model[0][0] is result.model[1][0]
    assert result.summary.after.params <= 150
    assert result.summary.after == facts.count_cost(result.model, (1, 12))


def test_a_plan_names_layers():
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.ReLU(), nn.Conv2d(16, 4, 3))
    plan = facts.compress(model, estimator="pela", input_shape=(3, 8, 8)).plan
    assert facts.compress(model, estimator="pela", input_shape=(3, 8, 8), layers=plan).plan == plan
    with pytest.raises(ValueError, match=r"no linear layer or 1x1 convolution is called 4; Sequential has 0, 2"):
        facts.compress(model, estimator="pela", input_shape=(3, 8, 8), layers=["4"])
    with pytest.raises(ValueError, match=r"layers are given as a list of names: \['0'\]"):
        facts.compress(model, estimator="pela", input_shape=(3, 8, 8), layers="0")


def test_flops_of_inputs_by_name():
    transformers = pytest.importorskip("transformers")
    settings = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**settings, image_size=8, patch_size=4))
    batches = [{"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}]
    assert facts.compress(model.eval(), batches).summary.before == facts.count_cost(model, (3, 8, 8))


def test_a_network_for_one_batch_size(vectors):
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(12, 16), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(torch.tanh(self.layer(x.reshape(1, 12))))

    assert list(facts.compress(Fixed(), [(vectors[0][0][:1], vectors[0][1][:1])]).plan) == ["layer"]


def test_names_and_sizes_decide():
    model = nn.ModuleDict(
        {
            "fc": nn.Linear(4, 10),
            "narrow": nn.Linear(4, 9),
            "norm_fc": nn.Linear(4, 10),
            "head": nn.Linear(4, 10),
            "patch_embed": nn.Linear(4, 10),
            "downsample": nn.Sequential(nn.Linear(4, 10)),
            "conv": nn.Conv2d(4, 10, 1),
        }
    )
    assert list(select_layers(model).layers) == ["fc"]
    assert list(select_layers(model, ["head", "narrow"]).layers) == ["head", "narrow"]


def test_unknown_name():
    with pytest.raises(
        ValueError, match="no linear layer or 1x1 convolution is called blocks; EveryShape has grid, windows"
    ):
        select_layers(make_model(), ["grid", "blocks"])


def test_nothing_to_compress():
    with pytest.raises(
        ValueError, match=r"Sequential has no layer to compress: 0: it has fewer than 10 outputs\. Name the layers"
    ):
        select_layers(nn.Sequential(nn.Linear(4, 2)))


class LowRankUpdate(nn.Linear):
    """A subclass as adapters are: it adds something to what its weight makes."""

    def forward(self, x):
        return super().forward(x) + x.mean()


def plain_and(layer):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), layer, nn.Tanh(), nn.Linear(16, 4))


def hooked(register, hook):
    layer = nn.Linear(16, 16)
    getattr(layer, register)(hook)
    return layer


def with_another_forward():
    layer = nn.Linear(16, 16)
    layer.forward = lambda x: nn.Linear.forward(layer, x) + 1
    return layer


def fail(module, args, output):
    raise RuntimeError("a hook for other inputs")


HOOK = "a hook, or a `forward` of its own, changes what it computes"


class TestLayersThatComputeMore:
    @pytest.mark.parametrize(
        ("layer", "reason"),
        [
            (LowRankUpdate(16, 16), "it is a LowRankUpdate, which computes in a way of its own"),
            (with_another_forward(), HOOK),
            (hooked("register_forward_hook", lambda module, args, output: 2 * output), HOOK),
            (hooked("register_forward_pre_hook", lambda module, args: 2 * args[0]), HOOK),
            (nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), "its weight is parametrized; remove_"),
        ],
    )
    def test_they_are_left_alone_or_refused(self, layer, reason, vectors):
        model = plain_and(layer)
        selection = select_layers(model)
        assert "0" in selection.layers and selection.skipped["2"].startswith(reason)
        with pytest.raises(ValueError, match=rf"layer 2 cannot be compressed: {re.escape(reason)}"):
            facts.compress(model, vectors, layers=["0", "2"])

    def test_a_convolution_too(self):
        model = nn.Sequential(nn.Conv2d(12, 16, 1), hooked_convolution := nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1))
        hooked_convolution.register_forward_hook(lambda module, args, output: -output)
        assert reasons_to_skip(model) == {"1": HOOK}

    def test_a_hook_for_other_inputs(self):
        assert reasons_to_skip(plain_and(hooked("register_forward_hook", fail)))["2"] == HOOK

    def test_hooks_that_watch_and_a_forward_that_computes_the_same_are_no_reason(self):
        seen = []
        model = plain_and(hooked("register_forward_hook", lambda module, args, output: seen.append(output)))
        model[0].forward = lambda x: F.linear(x, model[0].weight, model[0].bias)
        assert "2" not in reasons_to_skip(model) and "0" not in reasons_to_skip(model)

    def test_looking_moves_nothing(self, vectors):
        """Reading the weight of a `spectral_norm` layer in training mode would."""
        model = plain_and(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))).train()
        before = copy.deepcopy(model.state_dict())
        facts.compress(model, vectors, **UNIFORM)
        assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
        assert model.training and model[2].training

    def test_adapters_are_to_be_merged_first(self, vectors):
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["2"], r=12, init_lora_weights=False))
        with pytest.raises(ValueError, match=r"has adapters of PEFT .* model = model.merge_and_unload\(\)"):
            facts.compress(adapted, vectors)
        merged = adapted.merge_and_unload()
        expected, result = merged(vectors[0][0]), facts.compress(merged, vectors, ratio=1.0)
        torch.testing.assert_close(result.model(vectors[0][0]), expected)
        assert set(facts.compress(merged, vectors, ratio=0.5).plan) == {"0", "2"}
