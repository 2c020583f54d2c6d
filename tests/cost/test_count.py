import math
from functools import cache

import pytest
import timm
import torch
from torch import nn

import facts
from facts.compression.compress import compress_prepared
from facts.estimators import PELA
from facts.models import MambaVisionModel, TimmModel
from facts.search import Uniform
from facts.search.budget import Budget

IMAGE = (3, 224, 224)
RECIPES = {
    "DeiT-B distilled": TimmModel(tag="deit_base_distilled_patch16_224", weights="random"),
    "DeiT-B plain": TimmModel(tag="deit_base_patch16_224", weights="random"),
    "Swin-B": TimmModel(tag="swin_base_patch4_window7_224", weights="random"),
    "ConvNeXt-B": TimmModel(tag="convnext_base", weights="random"),
    "MambaVision-B": MambaVisionModel(variant="B", weights="random"),
}
# GFLOPs of the dense network, and at 60, 50 and 40 % (readings of the paper).
PUBLISHED = {
    "DeiT-B distilled": (33.89, 20.41, 17.07, 13.68),
    "DeiT-B plain": (33.72, 20.30, 16.98, 13.61),
    "Swin-B": (30.30, 18.40, 15.47, 12.47),
    "ConvNeXt-B": (30.75, 18.85, 15.90, 12.92),
    "MambaVision-B": (29.94, 23.15, 21.47, 19.77),
}
NUM_LAYERS = {"DeiT-B distilled": 48, "DeiT-B plain": 48, "Swin-B": 96, "ConvNeXt-B": 72}


@pytest.fixture(scope="module")
def networks():
    with torch.device("meta"):
        return {name: recipe.build() for name, recipe in RECIPES.items()}


@pytest.fixture(scope="module")
def compressed(networks):
    """A function from a network's name and a ratio to its compression; networks are prepared once."""
    prepared = cache(lambda name: facts.prepare(networks[name], input_shape=IMAGE))
    return cache(lambda name, ratio: compress_prepared(prepared(name), PELA(), Uniform(), Budget.of(ratio), "plain"))


@pytest.mark.parametrize("column", range(4), ids=["dense", "60 %", "50 %", "40 %"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_gflops(compressed, name, column):
    result = compressed(name, (1.0, 0.6, 0.5, 0.4)[column])
    counted = facts.count_cost(result.model, IMAGE).flops
    assert f"{counted / 1e9:.2f}" == f"{PUBLISHED[name][column]:.2f}"
    assert result.summary.after.flops == counted
    assert f"{result.summary.before.flops / 1e9:.2f}" == f"{PUBLISHED[name][0]:.2f}"
    assert len(result.plan) == NUM_LAYERS.get(name, len(result.plan))


@pytest.mark.parametrize(("name", "millions"), [("DeiT-B distilled", "87.3"), ("MambaVision-B", "97.69")])
def test_published_parameters(networks, name, millions):
    params = facts.count_cost(networks[name], IMAGE).params / 1e6
    assert f"{params:.{len(millions.partition('.')[2])}f}" == millions


@pytest.mark.parametrize("name", ["DeiT-B distilled", "DeiT-B plain"])
def test_full_rule_adds_attention_and_nothing_else(networks, name):
    paper, full = (facts.count_cost(networks[name], IMAGE, rule).flops for rule in ("paper", "full"))
    tokens, dim, depth = {"DeiT-B distilled": 198, "DeiT-B plain": 197}[name], 768, 12
    assert full - paper == 2 * 2 * tokens**2 * dim * depth  # QKᵀ and AV


def test_full_rule_adds_mambavisions_mixing(networks):
    paper, full = (facts.count_cost(networks["MambaVision-B"], IMAGE, rule).flops for rule in ("paper", "full"))
    attention = 5 * 4 * 196**2 * 512 + 2 * 4 * 49**2 * 1024  # blocks, products, tokens, width
    convolutions = 5 * 2 * 2 * 3 * 196 * 256 + 3 * 2 * 2 * 3 * 49 * 512  # mixers, branches, operations, taps, ...
    scan = 5 * 9 * 8 * 196 * 256 + 3 * 9 * 8 * 49 * 512  # mixers, operations, states, tokens, channels
    stem_norms = 4 * (64 * 112**2 + 128 * 56**2)
    assert full - paper == attention + convolutions + scan + stem_norms


def test_by_hand():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 2, stride=2, bias=False),  # 4 x 4 maps
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.Flatten(2),
        nn.LayerNorm(16),
        nn.Linear(16, 5),
    )
    products = 2 * 16 * 8 * (3 * 2 * 2) + 2 * 8 * 16 * 5
    elementwise = (4 + 1 + 5) * 8 * 16
    params = 3 * 8 * 4 + 2 * 8 + 2 * 16 + 16 * 5 + 5
    for rule in ("paper", "full"):
        assert facts.count_cost(model, (3, 8, 8), rule) == facts.Cost(flops=products + elementwise, params=params)


def test_counting_leaves_the_network_alone():
    model = timm.create_model("vit_tiny_patch16_224", depth=1).train()
    facts.count_cost(model, IMAGE)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    assert all(math.isfinite(parameter.sum().item()) for parameter in model.parameters())
    with pytest.raises(ValueError, match="rule must be 'paper' or 'full', got 'fvcore'"):
        facts.count_cost(model, IMAGE, rule="fvcore")


def test_a_network_can_say_what_all_of_its_work_is():
    class TwoParts(nn.Sequential):
        def forward(self, x):
            return self[0](x)

        def whole_forward(self, x):
            self[1](self(x))

    network = TwoParts(nn.Linear(5, 7), nn.Linear(7, 11))
    assert facts.count_cost(network, (1, 5)).flops == 2 * (5 * 7 + 7 * 11)
