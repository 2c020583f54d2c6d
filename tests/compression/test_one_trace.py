"""One trace of the network answers which layers there are, how often they run, and what it all costs."""

import copy

import pytest
import timm
import torch
from torch import nn

import facts
from facts.search import Search, SearchResult

TINY = {"img_size": 32, "patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 2, "num_classes": 10}


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


NETWORKS = {
    "resnet": lambda: timm.models.ResNet(timm.models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=10),
    "convnext": lambda: timm.models.ConvNeXt(num_classes=10, depths=(1, 1, 1, 1), dims=(16, 16, 32, 32), conv_mlp=True),
    "vit": lambda: timm.create_model("vit_tiny_patch16_224", **TINY),
    "beit": lambda: timm.create_model("beit_base_patch16_224", **TINY),
    "mixer": lambda: timm.models.MlpMixer(num_classes=10, img_size=32, embed_dim=48, num_blocks=2, patch_size=16),
    "attention": Attending,
}


@pytest.fixture(params=NETWORKS)
def network(request):
    torch.manual_seed(0)
    return NETWORKS[request.param]().eval()


class MetaPasses:
    """Counts the forward passes of a class of networks without values, and the networks that they are passes of."""

    def __init__(self, monkeypatch, kind):
        self.sizes, self.networks = [], []
        forward = kind.forward

        def counted(network, inputs):
            if inputs.is_meta:
                self.sizes.append(len(inputs))
                self.networks.append(network)
            return forward(network, inputs)

        monkeypatch.setattr(kind, "forward", counted)


@pytest.mark.parametrize(
    "arguments",
    [
        {"calibration": [(torch.randn(4, 3, 32, 32), torch.arange(4))]},
        {"estimator": "pela", "input_shape": (3, 32, 32)},
        {"estimator": "pela", "input_shape": (3, 32, 32), "convolutions": True, "params": 10**4},
        {"calibration": [(torch.randn(4, 3, 32, 32), torch.arange(4))], "search": "cors", "flops": 10**6},
    ],
    ids=["data", "shape", "params", "flops"],
)
def test_a_sample_and_two_of_it_go_through_one_copy(network, arguments, monkeypatch):
    """Whether the layers are many, convolutions too, or the budget is one of the whole network."""
    whole = facts.count_cost(network, (3, 32, 32))
    limits = {name: 0.9 * getattr(whole, name) for name in ("flops", "params") if name in arguments}
    passes = MetaPasses(monkeypatch, type(network))
    facts.compress(network, **{**arguments, **limits})
    assert passes.sizes == [1, 2]
    assert len(set(map(id, passes.networks))) == 1


@pytest.mark.parametrize("options", [{"ratio": 0.5}, {"ratio": 0.3, "cost": "params", "convolutions": True}], ids=str)
def test_the_cost_in_the_summary_is_the_network_s(network, options):
    before = copy.deepcopy(network)
    result = facts.compress(network, estimator="pela", input_shape=(3, 32, 32), **options)
    assert any(rank is not None for rank in result.plan.values())
    assert result.summary.before == facts.count_cost(before, (3, 32, 32))
    assert result.summary.after == facts.count_cost(result.model, (3, 32, 32))


class EveryOther(Search):
    def allocate(self, problem):
        return SearchResult({name: None if number % 2 else 1 for number, name in enumerate(problem.layers)})


def test_layers_that_stay_dense_cost_what_they_did(network):
    """And convolutions among them are convolutions again."""
    settings = {"input_shape": (3, 32, 32), "ratio": 0.9, "convolutions": True}
    result = facts.compress(network, estimator="pela", search=EveryOther(), **settings)
    assert {None, 1} == set(result.plan.values())
    assert result.summary.after == facts.count_cost(result.model, (3, 32, 32))
