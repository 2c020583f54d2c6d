"""Which parts are compressed, and the reason why each of the others is not."""

import re
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import facts
from facts.parts.attention import OutputUnit, ScoreUnit
from facts.parts.layers import NEVER_USED, NOT_PER_SAMPLE, LayerPart, reasons_to_skip, select_layers
from tests.networks import UNIFORM
from tests.refusals import refused, refuses
from tests.toys import Net, linears


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def everything():
    """Vectors `[N, 12]`; one layer for each reason."""

    def run(net, x):
        x = net.small(net.normaliser(torch.tanh(net.good(x))))
        x = F.linear(x, net.read.weight, net.read.bias) + net.of_a_table(net.table)
        return net.classifier(net.second(net.tied(net.own(x))))

    sizes = {"good": (12, 16), "small": (16, 9), "read": (9, 16), "of_a_table": (4, 16), "classifier": (16, 10)}
    layers = {name: nn.Linear(*size) for name, size in sizes.items()}
    net = Net(run, **layers, **linears("normaliser", "idle", "tied", "second", size=16), own=Doubling(16, 16))
    net.second.weight = net.tied.weight
    net.register_buffer("table", torch.randn(1, 4))
    return net


@pytest.fixture
def vectors():
    torch.manual_seed(1)
    return [(torch.randn(6, 12), torch.randint(4, (6,))) for _ in range(2)]


def test_each_reason_and_layers_that_are_named(vectors):
    result = facts.compress(everything(), vectors)
    assert list(result.plan) == ["good"]
    assert result.skipped == {
        "normaliser": "its name holds `norm`",
        "small": "it has fewer than 10 outputs",
        "idle": NEVER_USED,
        "read": NEVER_USED,
        "of_a_table": NOT_PER_SAMPLE,
        "own": "it is a Doubling, which has its own way of computing",
        "tied": "it shares its weight with second",
        "second": "it shares its weight with tied",
        "classifier": "its name holds `classifier`",
    }
    prepared = facts.prepare(everything(), vectors, layers=["good", "normaliser"])
    assert list(prepared.layers) == ["good", "normaliser"]
    assert len(prepared.skipped) == 8 and prepared.skipped["small"] == "not among the layers named"


def test_a_network_that_looks_at_values(vectors, caplog):
    """Which the meta device does not have: its FLOPs stay unknown, those of its layers do not."""

    def careless(net, x):
        return net.head(torch.tanh(net.layer((2.0 if x.sum().item() > 0 else 1.0) * x)))

    model = Net(careless, layer=nn.Linear(12, 16), head=nn.Linear(16, 4))
    result = facts.compress(model, vectors, **UNIFORM)
    assert "no FLOPs: Net does not run on the meta device" in caplog.text
    assert result.summary.before.flops is None and result.summary.budget["flops"] == 2 * 12 * 16 // 2
    assert result.plan["layer"] == 3
    with pytest.raises(RuntimeError, match="meta"):  # without data there is no other way
        facts.prepare(model, input_shape=(1, 12))


def test_the_last_layer_makes_the_outputs_whatever_its_name(vectors):
    prepared = facts.prepare(nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12)), vectors)
    assert (list(prepared.layers), prepared.skipped) == (["0"], {"2": "it is the output layer"})


def test_a_layer_under_two_names_is_replaced_under_both(vectors):
    layer = nn.Linear(12, 12)
    model = nn.Sequential(nn.Sequential(layer, nn.Tanh()), nn.Sequential(layer, nn.Tanh()), nn.Linear(12, 4))
    result = facts.compress(model, vectors, budget=facts.Budget(params=150))
    assert result.model[0][0] is result.model[1][0] and result.summary.after.params <= 150
    assert result.summary.after == facts.count_cost(result.model, (1, 12))


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.ReLU(), nn.Conv2d(16, 4, 3))


def test_a_plan_names_layers_and_names_come_before_patterns():
    plan = facts.compress(model := convolutions(), estimator="pela").plan
    assert facts.compress(model, estimator="pela", layers=plan).plan == plan
    model = nn.Sequential(OrderedDict({"e[0]": nn.Linear(12, 12), "e0": nn.Linear(12, 12), "out": nn.Linear(12, 4)}))
    assert list(facts.compress(model, estimator="pela", layers=["e[0]"]).plan) == ["e[0]"]


HOOK = "a hook, or a `forward` of its own, changes what it computes"
NONE = "no linear layer or 1x1 convolution is called"
test_names_that_no_layer_has = refused(
    (lambda: facts.prepare(convolutions(), layers=["4"]), f"{NONE} 4; Sequential has 0, 2"),
    (lambda: facts.prepare(convolutions(), layers="vision.*"), rf"{NONE} vision\.\*; Sequential has 0, 2"),
    (lambda: facts.prepare(convolutions(), layers="0"), r"or given as a list of names: \['0'\]"),
)


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


class TestLayersThatComputeMore:
    @pytest.mark.parametrize(
        ("layer", "reason"),
        [
            (Doubling(16, 16), "it is a Doubling, which has its own way of computing"),
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
        message = rf"layer 2 cannot be compressed: {re.escape(reason)}"
        refuses(message, facts.compress, model, vectors, layers=["0", "2"])

    def test_hooks_that_watch_and_a_forward_that_computes_the_same_are_no_reason(self):
        """The subclass is like OpenMMLab's, made for old versions of PyTorch."""

        class Unchanged(nn.Linear):
            def forward(self, x):
                return super().forward(x)

        seen = []
        model = plain_and(hooked("register_forward_hook", lambda module, args, output: seen.append(output)))
        model[0].forward = lambda x: F.linear(x, model[0].weight, model[0].bias)
        model.append(Unchanged(4, 16))
        assert not reasons_to_skip(model).keys() & {"0", "2", "5"}

    def test_adapters_are_to_be_merged_first(self, vectors):
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["2"], r=12, init_lora_weights=False)
        adapted = peft.get_peft_model(plain_and(nn.Linear(16, 16)), config)
        refuses(r"has adapters of PEFT .* model = model.merge_and_unload\(\)", facts.compress, adapted, vectors)
        assert set(facts.compress(adapted.merge_and_unload(), vectors, ratio=0.5).plan) == {"0", "2"}


class Attention(nn.Module):
    """One head, as wide as the inputs; its code takes the width from the projection's outputs, or from the inputs."""

    def __init__(self, size: int, follows: bool):
        super().__init__()
        self.num_heads, self.follows = 1, follows
        self.qkv, self.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x):
        projected = self.qkv(x)
        assert self.follows or projected.shape[-1] == 3 * x.shape[-1]  # as anyone's code may check
        width = projected.shape[-1] // 3 if self.follows else x.shape[-1]
        queries, keys, values = projected.unflatten(-1, (3, width)).unbind(-2)
        return self.proj(F.scaled_dot_product_attention(queries, keys, values))


def test_one_head_is_a_unit_only_if_the_code_follows_its_width():
    """At the width of the inputs both codes run; narrower, one does not."""
    batches = [(torch.randn(8, 5, 12), torch.randint(12, (8,))) for _ in range(2)]
    networks = (Net(lambda net, x: net.attention(x).mean(1), attention=Attention(12, each)) for each in (True, False))
    follows, fixed = (facts.prepare(each.eval(), batches, held_out=(), parts="units") for each in networks)
    assert [type(part) for part in follows.parts.values()] == [ScoreUnit, OutputUnit]
    assert [type(part) for part in fixed.parts.values()] == [LayerPart, LayerPart]
    assert set(fixed.skipped) >= {"attention.qkv", "attention.proj"} and not follows.skipped
    assert facts.compress(follows, estimator="pela", search="uniform", ratio=0.5).model(batches[0][0]).shape == (8, 12)


def test_a_pattern_takes_the_layers_of_a_tower_that_reach_the_loss(tmp_path):
    """The features are those before the last layer of the tower, as in the published networks."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**sizes, num_hidden_layers=3, image_size=16, patch_size=4)
    text = transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=64)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=63)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids, images = torch.randint(63, (3, 8, 20)), torch.randn(3, 8, 3, 16, 16)
    ids[..., 2:18] = 63
    texts = [{"input_ids": text, "pixel_values": image} for text, image in zip(ids, images, strict=True)]
    result = facts.compress(model, texts, layers="model.vision_tower.*", ratio=0.5)
    units = ("self_attn.scores", "self_attn.outputs", "mlp", "tokens")
    layers = "model.vision_tower.encoder.layers"
    assert result.plan.keys() == {f"{layers}.{layer}.{unit}" for layer in (0, 1) for unit in units}
    assert result.skipped[f"{layers}.2.mlp.fc1"] == "the loss does not depend on it"
    assert result.skipped["model.language_model.layers.0.mlp.up_proj"] == "not among the layers named"
    logits = result.model(**texts[0]).logits
    assert not logits.equal(model(**texts[0]).logits)
    facts.save_compressed(result, tmp_path)
    assert facts.load_compressed(tmp_path).model(**texts[0]).logits.equal(logits)
