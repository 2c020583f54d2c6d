"""OpenMMLab's networks taken apart, at the paper's cost, and backbones out of timm's classifiers."""

from tests.detection import installed  # noqa: F401

# isort: split

import copy
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from hydra.utils import instantiate
from mmengine.logging import MessageHub
from omegaconf import OmegaConf
from torch import nn

import facts
from experiments.mini.train import FILES, mini_recipe
from facts.calibration.prepare import prepare
from facts.compression.compress import compress
from facts.cost.count import count_cost
from facts.models.openmmlab import library_network, untrained
from facts.modules.forms import PLAIN, PivotedLinear
from facts.modules.lowrank import LowRankLayer, LowRankLinear
from facts.parts.attention import OutputUnit, ScoreUnit
from facts.parts.hidden import HiddenUnit
from facts.parts.layers import EXCLUDED_NAMES, select_layers

pytestmark = pytest.mark.external

NAMES = ("mask_rcnn_swin_b", "upernet_deit_b")


def paper_recipe(name):
    (file,) = (file for file in FILES if file.stem == name)
    node = OmegaConf.to_container(OmegaConf.load(file).paper)
    return instantiate({**node, "weights": "random", "classifier": None}, _convert_="all")


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_the_library_gives_the_library_s_own_outputs(name, tmp_path):
    recipe = replace(mini_recipe(name), weights="random")
    original = library_network(recipe).eval()
    logs = MessageHub.get_instance(name)  # as the library's own training leaves them in its files
    logs.update_scalar("train/loss", np.float64(0.5))
    checkpoint = {"meta": {"epoch": 12}, "state_dict": original.state_dict(), "message_hub": logs.state_dict()}
    torch.save(checkpoint, tmp_path / "epoch_12.pth")
    network = replace(recipe, weights=str(tmp_path / "epoch_12.pth")).build()
    images = torch.randn(2, 3, 64, 64)
    expected, maps = original.extract_feat(images), network(images).maps
    assert len(maps) == len(expected)
    for ours, theirs in zip(maps, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # float32, in another order of operations
    if name != "mask_rcnn_swin_b":
        torch.testing.assert_close(network(images).logits, original.decode_head(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "ratio", "gflops", "mparams"),
    [
        ("mask_rcnn_swin_b", 0.6, (358.5, 290.3), None),  # with Swin's three downsampling layers
        ("upernet_deit_b", 0.5, (848.3, 761.1), (144.3, 101.8)),
        # The paper's count has the 1.025 M parameters of Swin-B's classifier.
        ("upernet_swin_b", 0.6, (594.6, 527.7), (122.3 - 1.025, 88.7 - 1.025)),
    ],
)
def test_cost_at_full_size_is_the_paper_s(name, ratio, gflops, mparams):
    with torch.device("meta"):
        network = paper_recipe(name).build()
    costs = [count_cost(network, (3, 512, 512))]
    excluded = [part for part in EXCLUDED_NAMES if name != "mask_rcnn_swin_b" or part != "downsample"]
    layers = select_layers(network, excluded_names=excluded).layers
    assert all(layer.startswith("backbone.") for layer in layers)
    for layer, dense in layers.items():
        rank = PLAIN.rank_of_ratio(dense.out_features, dense.in_features, ratio)
        network.set_submodule(layer, PLAIN.empty(dense, rank))
    costs.append(count_cost(network, (3, 512, 512)))
    assert [cost.flops / 1e9 for cost in costs] == pytest.approx(gflops, rel=0.001)  # the paper gives one decimal
    if mparams:
        assert [cost.params / 1e6 for cost in costs] == pytest.approx(mparams, rel=0.002)


@pytest.mark.parametrize("name", NAMES)
def test_attention_and_mlps_of_the_backbone_are_units(name):
    network = replace(mini_recipe(name), weights="random").build()
    with torch.no_grad():
        for parameter in network.parameters():  # tables of positions that are not zero
            parameter.add_(0.02 * torch.randn_like(parameter))
    prepared = facts.prepare(network, input_shape=(3, 64, 64), parts="units")
    kinds = {type(part) for layer, part in prepared.parts.items() if "attn" in layer or "ffn" in layer}
    assert kinds == {ScoreUnit, OutputUnit, HiddenUnit}
    images = torch.randn(1, 3, 64, 64)
    expected, maps = network(images).maps, prepared.rewritten(images).maps
    for ours, theirs in zip(maps, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)  # float32, and heads as wide as the inputs


def drawn(name, size=64):
    """A recipe, and its classifier for images of a size, with every parameter drawn, norms and biases too."""
    recipe = replace(mini_recipe(name), weights="random")
    arguments = {**recipe.classifier.arguments, "img_size": size}
    classifier = replace(recipe.classifier, weights="random", arguments=arguments).build()
    for parameter in classifier.parameters():
        nn.init.normal_(parameter, std=0.1)
    return recipe, classifier


@torch.no_grad()
def features(classifier, images):
    """Features of the last block, `[N, C, H, W]`."""
    if hasattr(classifier, "layers"):
        return classifier.forward_features(images).movedim(-1, 1)
    tokens = copy.deepcopy(classifier)
    tokens.norm = nn.Identity()
    side = images.shape[-1] // 16
    return tokens.forward_features(images)[:, 1:].mT.unflatten(2, (side, side))


@pytest.mark.parametrize("name", ["mask_rcnn_swin_b", "upernet_deit_b"])
@pytest.mark.parametrize("form", [None, "plain", "pivoted"])
def test_the_backbone_gives_the_classifier_s_features(name, form):
    recipe, classifier = drawn(name)
    if form:  # Swin's downsampling layers too
        names = [layer for layer, module in classifier.named_modules() if isinstance(module, nn.Linear)]
        names.remove("head" if "head" in names else "head.fc")
        prepared = prepare(classifier, layers=names, input_shape=(3, 64, 64))
        classifier = compress(prepared, estimator="pela", form=form, ratio=0.5).model
    network = untrained(recipe, classifier)
    images = torch.randn(2, 3, 64, 64)
    ours = network.backbone(images)[-1]
    torch.testing.assert_close(ours, features(classifier, images), rtol=1e-4, atol=1e-5)  # float32
    kinds = {type(module) for module in network.backbone.modules() if isinstance(module, LowRankLayer)}
    assert kinds == {None: set(), "plain": {LowRankLinear}, "pivoted": {PivotedLinear}}[form]


def test_positions_are_resampled_to_the_backbone_s_grid():
    recipe, classifier = drawn("upernet_deit_b", size=32)
    network = untrained(recipe, classifier)
    assert classifier.pos_embed.shape[1] == 1 + 2 * 2
    assert network.backbone.pos_embed.shape[1] == 1 + 4 * 4
    bias = classifier.patch_embed.proj.bias
    means = [(pos[:, 1:].mean(dim=1)) for pos in (classifier.pos_embed + bias, network.backbone.pos_embed)]
    torch.testing.assert_close(*means, rtol=0, atol=0.1)


def test_other_families_and_shapes_are_refused():
    recipe, classifier = drawn("upernet_swin_b")
    with pytest.raises(ValueError, match="a ConvNeXt cannot be the backbone"):
        untrained(recipe, timm.create_model("convnext_atto"))
    other = timm.create_model("swin_tiny_patch4_window7_224", embed_dim=48, num_heads=[2, 4, 8, 16])
    with pytest.raises(ValueError, match="does not have its classifier's shapes"):
        untrained(recipe, other)
    classifier.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"SwinTransformer has no place for extra\.weight, extra\.bias"):
        untrained(recipe, classifier)
