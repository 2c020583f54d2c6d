import math
from functools import cache

import pytest
import timm
import torch
from torch import nn

import facts
from facts.compression.compress import compress_prepared
from facts.cost.count import count_params
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
    "DeiT-B distilled": ("33.89", "20.41", "17.07", "13.68"),
    "DeiT-B plain": ("33.72", "20.30", "16.98", "13.61"),
    "Swin-B": ("30.30", "18.40", "15.47", "12.47"),
    "ConvNeXt-B": ("30.75", "18.85", "15.90", "12.92"),
    "MambaVision-B": ("29.94", "23.15", "21.47", "19.77"),
}
NUM_LAYERS = {"DeiT-B distilled": 48, "DeiT-B plain": 48, "Swin-B": 96, "ConvNeXt-B": 72}


@cache
def built(name):
    with torch.device("meta"):
        return RECIPES[name].build()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_gflops(name):
    prepared = facts.prepare(built(name), input_shape=IMAGE, form="plain")
    assert len(prepared.parts) == NUM_LAYERS.get(name, len(prepared.parts))
    allocated = [compress_prepared(prepared, PELA(), Uniform(), Budget.of(ratio)) for ratio in (0.6, 0.5, 0.4)]
    gflops = [result.summary.after.flops / 1e9 for result in allocated]
    assert tuple(f"{each:.2f}" for each in (prepared.flops / 1e9, *gflops)) == PUBLISHED[name]
    assert facts.count_cost(allocated[1].model, IMAGE).flops == allocated[1].summary.after.flops


@pytest.mark.parametrize(("name", "millions"), [("DeiT-B distilled", "87.3"), ("MambaVision-B", "97.69")])
def test_published_parameters(name, millions):
    assert f"{count_params(built(name)) / 1e6:.{len(millions.partition('.')[2])}f}" == millions


def test_full_rule_adds_attention_and_nothing_else():
    paper, full = (facts.count_cost(built("DeiT-B plain"), IMAGE, rule).flops for rule in ("paper", "full"))
    tokens, dim, depth = 197, 768, 12
    assert full - paper == 2 * 2 * tokens**2 * dim * depth  # QKᵀ and AV


def test_full_rule_adds_mambavisions_mixing():
    paper, full = (facts.count_cost(built("MambaVision-B"), IMAGE, rule).flops for rule in ("paper", "full"))
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
