"""Architectures of timm and PyTorch, small and with random weights, compressed without naming their layers."""

import copy

import pytest
import timm
import torch
from torch import nn

import facts
from facts.models import TimmModel
from facts.modules.lowrank import LowRankLayer

TINY = {"img_size": 32, "patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 2}
STAGES = {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32)}
SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 2)}
PVT = {"depths": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 32), "num_heads": (1, 2, 2, 4)}


class Attending(nn.Module):
    """PyTorch's own attention, which multiplies by a weight that no layer holds."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 4, stride=4)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, images):
        x = self.embed(images).flatten(2).mT
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.encoder(x).mean(dim=1))


def build(tag, **arguments):
    return TimmModel(tag=tag, weights="random", arguments={"num_classes": 10, **arguments}).build()


NETWORKS = {
    "resnet": lambda: timm.models.ResNet(timm.models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=10),
    "convnext": lambda: timm.models.ConvNeXt(num_classes=10, **STAGES, conv_mlp=True),
    "vit": lambda: build("vit_tiny_patch16_224", **TINY),
    "eva": lambda: build("eva02_tiny_patch14_224", **TINY),
    "swin": lambda: build("swinv2_tiny_window8_256", **SWIN),
    "pvt": lambda: build("pvt_v2_b0", **PVT),
    "attention": Attending,
}
SHAPE = (3, 32, 32)
LOADER = [(torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0)), torch.arange(4) % 4)]


@pytest.fixture(params=NETWORKS)
def network(request):
    torch.manual_seed(0)
    return NETWORKS[request.param]().eval()


@pytest.mark.parametrize("options", [{"search": "cors", "form": "plain"}, {"layers": "all"}], ids=str)
def test_budget_outputs_cost_and_folder(network, options, tmp_path):
    images, dense = LOADER[0][0], copy.deepcopy(network)
    whole = facts.count_cost(network, SHAPE)
    result = facts.compress(network, LOADER, **options, budget=facts.Budget(flops=0.9 * whole.flops))
    summary = result.summary
    assert summary.before == whole
    assert summary.after == facts.count_cost(result.model, SHAPE)
    assert summary.after.flops <= 0.9 * whole.flops and summary.after.params < whole.params
    layers = {name for name, module in result.model.named_modules() if isinstance(module, LowRankLayer)}
    assert layers == {name for name, rank in result.plan.items() if rank is not None} and layers
    assert all(result.skipped.values()) and not result.plan.keys() & result.skipped.keys()
    with torch.no_grad():
        assert network(images).equal(dense(images))  # the original is as it was
        outputs = result.model(images)
        if hasattr(network, "recipe"):
            facts.save_compressed(result, tmp_path)
            assert facts.load_compressed(tmp_path).model(images).equal(outputs)
    assert outputs.isfinite().all()
