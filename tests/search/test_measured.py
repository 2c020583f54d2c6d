"""Measured sensitivities, and repeated runs with one layer changed, against runs of whole networks."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from experiments.mini.train import mini_recipe
from facts.modules.lowrank import LowRankLinear
from facts.moments.losses import SampledLabels, kl_divergence, squared_error, summed_cross_entropy
from facts.parts.layers import select_layers
from facts.search import ASVDSearch
from facts.search.sensitivity_measured import Prefix, Sensitivity
from tests.networks import Runs, image_batches, make_convnext, make_model, make_swin, seen_by
from tests.search.problems import every_rank, make_problem
from tests.toys import Net, linears

comparisons = []


def kl(original, changed):
    """Σ p (log p - log q), mean over samples, by the definition."""
    p, q = original.softmax(dim=-1), changed.softmax(dim=-1)
    return (p * (p / q).log()).sum(dim=-1).mean().item()


@torch.no_grad()
def plain(problem, name, rank, read):
    """One whole pass of a copy with one layer replaced, over all samples at once."""
    changed = copy.deepcopy(problem.model)
    changed.set_submodule(name, LowRankLinear(*problem.decompositions[name].truncate(rank), problem.layers[name].bias))
    images = torch.cat([images for images, _ in problem.sensitivity])
    return read(problem.model, images), read(changed, images)


@pytest.mark.parametrize("sizes", [(7,), (1, 5, 1)])
def test_errors_are_those_of_whole_passes(sizes):
    problem = make_problem(sizes=sizes)
    profile = Sensitivity(problem).profile(every_rank(problem))
    for name, errors in profile.items():
        for rank, error in errors.items():
            expected = kl(*plain(problem, name, rank, lambda model, images: model(images)))
            assert error == pytest.approx(expected, rel=1e-9, abs=1e-15), (name, rank)
    assert max(errors[1] for errors in profile.values()) > 1e-5  # compression does show


def test_features_are_what_the_last_linear_layer_sees():
    problem = make_problem()
    for name, errors in Sensitivity(problem, of="features").profile({"grid": [2], "vector": [1, 3]}).items():
        for rank, error in errors.items():
            original, changed = plain(problem, name, rank, lambda model, images: seen_by(model.head, model, images))
            expected = ((changed - original).square().sum(1) / original.square().sum(1)).mean().item()
            assert error == pytest.approx(expected, rel=1e-9)


def test_losses_are_those_on_the_given_labels():
    problem = make_problem(sizes=(5, 2))
    profile = Sensitivity(problem, of="loss").profile({"grid": [2]})
    _, changed = plain(problem, "grid", 2, lambda model, images: model(images))
    labels = torch.cat([labels for _, labels in problem.sensitivity])
    assert profile["grid"][2] == pytest.approx(nn.functional.cross_entropy(changed, labels).item(), rel=1e-9)
    drawn = replace(problem, prepared=replace(problem.prepared, loss=SampledLabels(summed_cross_entropy)))
    with pytest.raises(ValueError, match="no labels to measure the loss on"):
        ASVDSearch(of="loss").allocate(drawn)


def noted_divergence(original, changed):
    comparisons.append(len(original))
    return kl_divergence(original, changed)


def nowhere(original, changed):
    return original.sum() * torch.nan


def test_what_was_measured_is_not_measured_again(tmp_path):
    ranks = {"grid": [1, 2], "tokens": [3]}
    problem = make_problem(cache=tmp_path, output_error=noted_divergence)
    profile = Sensitivity(problem).profile(ranks)
    comparisons.clear()
    again, runs = Sensitivity(problem), Runs(problem.model)
    assert again.profile(ranks) == profile and not runs.number
    more = again.profile({"grid": [1, 4]})
    assert comparisons == [4, 3] and more["grid"][1] == profile["grid"][1]  # two batches, one new rank


@pytest.mark.parametrize("fields", [{"sensitivity": image_batches([4, 3], seed=9)}, {"output_error": squared_error}])
def test_other_data_and_another_error_are_measured_for_themselves(tmp_path, fields):
    ranks = {"grid": [1]}
    first = Sensitivity(make_problem(cache=tmp_path)).profile(ranks)
    assert first["grid"][1] != Sensitivity(make_problem(cache=tmp_path, **fields)).profile(ranks)["grid"][1]
    assert Sensitivity(make_problem(cache=tmp_path)).profile(ranks) == first


def test_an_error_that_is_not_a_number_names_layer_and_rank(tmp_path):
    with pytest.raises(ValueError, match=r"layer grid at rank \[2\] is NaN"):
        Sensitivity(make_problem(cache=tmp_path, output_error=nowhere)).profile({"grid": [2]})
    assert not list(tmp_path.rglob("sensitivity-*"))


def in_place(net, images):
    """Change what modules gave, one of which gives a tuple with a mapping."""
    x = net.first(images.flatten(1)[:, :12])
    skip = net.relu(x)
    whole, parts = net.pair(net.second(skip))
    whole += parts["half"]
    return net.third(whole).add_(skip)


def shared_activation(net, images):
    """Call one activation within a block and after it: what the block gives does not call it again."""
    return net.third(net.act(net.second(net.block(images.flatten(1)[:, :12]))))


def skips_what_it_changed(net, images):
    """Skip connections from tensors that a later module, or a sum, went on to change in place."""
    x = net.first(images.flatten(1)[:, :12])
    x = x + net.second(net.relu(x))
    shifted = net.same(x)
    shifted += 1
    return x + net.third(shifted)


def toy(run):
    torch.manual_seed(0)
    activation, layers = nn.Tanh(), linears("first", "second", "third")
    if run is shared_activation:
        layers |= {"act": activation, "block": nn.Sequential(layers.pop("first"), activation)}
    pair = Net(lambda _, x: (x, {"half": x / 2}))
    return Net(run, **layers, relu=nn.ReLU(inplace=True), same=nn.Identity(), pair=pair).double()


MODELS = {
    "every_shape": (make_model, (3, 8, 8)),
    "swin": (make_swin, (3, 16, 16)),
    "convnext": (make_convnext, (3, 32, 32)),
    "mini_mambavision": (lambda: mini_recipe("mambavision_b").build().double(), (1, 32, 32)),
    **{run.__name__: (partial(toy, run), (3, 8, 8)) for run in (in_place, shared_activation, skips_what_it_changed)},
}


def halved(layer: nn.Linear) -> LowRankLinear:
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
        run = prefix.before([layer_name])
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
        prefix.before([layer])({layer: halved(model.get_submodule(layer)).forward})
        assert calls == after
