"""Backbones out of timm's classifiers: the same features under other names."""

from tests.detection import installed  # noqa: F401, I001

import copy
from dataclasses import replace

import pytest
import timm
import torch
from torch import nn

from experiments.mini.train import mini_recipe
from facts.calibration.prepare import prepare
from facts.compression.compress import compress
from facts.models.openmmlab import untrained
from facts.modules.lowrank import LowRankLayer, LowRankLinear
from facts.modules.forms import PivotedLinear

pytestmark = pytest.mark.external


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
    with torch.no_grad():
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
