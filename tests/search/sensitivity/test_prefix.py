"""A network with one layer changed, run from that layer on, gives bit for bit what a whole pass gives."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from experiments.mini.train import mini_recipe
from facts.modules.lowrank import LowRankLinear
from facts.parts.layers import select_layers
from facts.search.sensitivity.prefix import Prefix
from tests.networks import make_convnext, make_model, make_swin


class InPlace(nn.Module):
    """Changes what its modules gave, and has one that gives a tuple and one that gives a mapping."""

    class Pair(nn.Module):
        def forward(self, x):
            return x, {"half": x / 2}

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(12, 12) for _ in range(3))
        self.relu, self.pair = nn.ReLU(inplace=True), self.Pair()

    def forward(self, images):
        x = self.first(images.flatten(1)[:, :12])
        skip = self.relu(x)
        whole, parts = self.pair(self.second(skip))
        whole += parts["half"]
        return self.third(whole).add_(skip)


class SharedActivation(nn.Module):
    """One activation, within a block and after it: what the block gives does not call it again."""

    def __init__(self):
        super().__init__()
        self.act = nn.Tanh()
        self.block = nn.Sequential(nn.Linear(12, 12), self.act)
        self.second, self.third = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, images):
        return self.third(self.act(self.second(self.block(images.flatten(1)[:, :12]))))


class SkipsWhatItChanged(nn.Module):
    """Skip connections from tensors that a later module, or a sum, went on to change in place."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(12, 12) for _ in range(3))
        self.relu, self.same = nn.ReLU(inplace=True), nn.Identity()

    def forward(self, images):
        x = self.first(images.flatten(1)[:, :12])
        x = x + self.second(self.relu(x))
        shifted = self.same(x)
        shifted += 1
        return x + self.third(shifted)


def seeded(make):
    torch.manual_seed(0)
    return make().double()


MODELS = {
    "every_shape": (make_model, (3, 8, 8)),
    "swin": (make_swin, (3, 16, 16)),
    "convnext": (make_convnext, (3, 32, 32)),
    "mini_mambavision": (lambda: mini_recipe("mambavision_b").build().double(), (1, 32, 32)),
    **{make.__name__: (partial(seeded, make), (3, 8, 8)) for make in (InPlace, SharedActivation, SkipsWhatItChanged)},
}


def halved(layer: nn.Linear) -> LowRankLinear:
    """A layer's truncation to half its rank."""
    u, s, vh = torch.linalg.svd(layer.weight.detach(), full_matrices=False)
    rank = len(s) // 2
    return LowRankLinear(u[:, :rank] * s[:rank], vh[:rank], layer.bias)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_outputs_are_those_of_a_whole_pass(name):
    make, shape = MODELS[name]
    model, images = make().eval(), torch.randn(3, *shape, dtype=torch.float64)
    prefix = Prefix(model, images.clone())
    assert prefix.outputs.equal(model(images.clone()))
    for layer_name, layer in select_layers(model).layers.items():
        changed = copy.deepcopy(model)
        changed.set_submodule(layer_name, halved(layer))
        expected = changed(images.clone())
        with prefix.before([layer_name]) as run:
            for _ in range(2):  # the second time nothing of the first is left
                assert run({layer_name: halved(layer).forward}).equal(expected), layer_name
        assert not expected.equal(prefix.outputs)
    assert prefix.outputs.equal(model(images.clone()))


@torch.no_grad()
def test_what_comes_before_is_not_computed_again_and_what_comes_after_is():
    model, images = make_model(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    calls = []
    for name in ("grid", "windows", "tokens", "shared", "vector", "head"):
        module = model.get_submodule(name)
        module.forward = lambda x, name=name, own=module.forward: calls.append(name) or own(x)
    prefix = Prefix(model, images)
    assert calls == ["grid", "windows", "tokens", "shared", "shared", "vector", "head"]
    for layer, after in (("rows", ["tokens", "shared", "shared", "vector", "head"]), ("shared", ["vector", "head"])):
        calls.clear()
        with prefix.before([layer]) as run:
            run({layer: halved(model.get_submodule(layer)).forward})
        assert calls == after


@torch.no_grad()
def test_modules_have_their_own_forward_again_even_after_an_error():
    model, images = make_model(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    own = model.grid.forward
    model.grid.forward = mine = lambda x: own(x)
    prefix = Prefix(model, images)
    with prefix.before(["vector"]) as run, pytest.raises(ZeroDivisionError):
        run({"vector": lambda x: 1 / 0})
    assert model.grid.forward is mine
    assert all("forward" not in vars(module) for module in model.modules() if module is not model.grid)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model(images).equal(prefix.outputs)
