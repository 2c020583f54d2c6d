"""OpenMMLab's networks taken apart, at the paper's cost, and out of timm's classifiers; scenes, cells and folders."""
# ruff: noqa: E402

import pytest

for module in ("mmcv._ext", "mmdet", "mmseg"):
    pytest.importorskip(module, reason="the extra `detection` is not installed: make install-detection")

import copy
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import timm
import torch
from hydra.utils import instantiate
from mmdet.structures import DetDataSample
from mmengine.logging import MessageHub
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional as F

import facts
from experiments.mini import scenes
from experiments.mini.train import FILES, mini_recipe
from experiments.runner import run_cell
from experiments.train_dense import train
from facts.models.openmmlab import library_network, untrained
from facts.modules.forms import PLAIN, PivotedLinear
from facts.modules.lowrank import LowRankLayer, LowRankLinear
from facts.parts.attention import OutputUnit, ScoreUnit
from facts.parts.hidden import HiddenUnit
from facts.parts.layers import EXCLUDED_NAMES, select_layers
from facts.tasks.dense import ADE20K, NUM_GROUPS, Coco
from facts.utils.numerics import jackknife_errors

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
    torch.testing.assert_close([*maps], [*expected], rtol=1e-4, atol=1e-5)  # float32, in another order of operations
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
    costs = [facts.count_cost(network, (3, 512, 512))]
    excluded = [part for part in EXCLUDED_NAMES if name != "mask_rcnn_swin_b" or part != "downsample"]
    layers = select_layers(network, excluded_names=excluded).layers
    assert all(layer.startswith("backbone.") for layer in layers)
    for layer, dense in layers.items():
        rank = PLAIN.rank_of_ratio(dense.out_features, dense.in_features, ratio)
        network.set_submodule(layer, PLAIN.empty(dense, rank))
    costs.append(facts.count_cost(network, (3, 512, 512)))
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
    torch.testing.assert_close([*maps], [*expected], rtol=1e-3, atol=1e-4)  # float32, and heads as wide as the inputs


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", [None, "plain", "pivoted"])
def test_the_backbone_gives_the_classifier_s_features(name, form):
    recipe, classifier = drawn(name)
    if form:  # Swin's downsampling layers too
        names = [layer for layer, module in classifier.named_modules() if isinstance(module, nn.Linear)]
        names.remove("head" if "head" in names else "head.fc")
        prepared = facts.prepare(classifier, layers=names, input_shape=(3, 64, 64))
        classifier = facts.compress(prepared, estimator="pela", form=form, ratio=0.5).model
    network = untrained(recipe, classifier)
    images = torch.randn(2, 3, 64, 64)
    ours = network.backbone(images)[-1]
    torch.testing.assert_close(ours, features(classifier, images), rtol=1e-4, atol=1e-5)  # float32
    kinds = {type(module) for module in network.backbone.modules() if isinstance(module, LowRankLayer)}
    assert kinds == {None: set(), "plain": {LowRankLinear}, "pivoted": {PivotedLinear}}[form]


def test_positions_are_resampled_to_the_backbone_s_grid():
    recipe, classifier = drawn("upernet_deit_b", size=32)
    network = untrained(recipe, classifier)
    assert (classifier.pos_embed.shape[1], network.backbone.pos_embed.shape[1]) == (1 + 2 * 2, 1 + 4 * 4)
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


SMALL = {"num_calibration": 16, "batch_size": 4, "augmentation": "none", "num_workers": 0, "input_size": 64}


@pytest.fixture(scope="module")
def detection(tmp_path_factory):
    return scenes.DigitDetection(root=str(tmp_path_factory.mktemp("scenes") / "coco"), scale=(64, 64), **SMALL)


@pytest.fixture(scope="module")
def segmentation(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("scenes") / "ade20k")
    return scenes.DigitSegmentation(root=root, scale=(64, 64), crop=64, **SMALL)


@pytest.fixture(scope="module")
def detector():
    return mini_recipe("mask_rcnn_swin_b").build()


@pytest.fixture(scope="module")
def segmenters():
    return {name: mini_recipe(name).build() for name in ("upernet_swin_b", "upernet_deit_b")}


@pytest.fixture(params=["detection", "segmentation"])
def task(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def network(task, detector, segmenters):
    return detector if isinstance(task, Coco) else segmenters["upernet_swin_b"]


def test_batches_can_be_read_again_and_are_keyed_by_what_they_hold(task, network):
    calibration, sensitivity = task.calibration(network), task.sensitivity(network)
    (images, targets), *_ = calibration
    again, _ = next(iter(calibration))
    torch.testing.assert_close(images, again, rtol=0, atol=0)
    assert images.shape == (4, 3, 64, 64) and all(len(tensor) == 4 for tensor in targets.values())
    assert [len(batches) for batches in (calibration, sensitivity)] == [4, 3]
    assert calibration.content_key != sensitivity.content_key == task.sensitivity(network).content_key
    assert len({*chain(*calibration.items.indices, *sensitivity.items.indices)}) == 26
    factors, held_out = task.analysis(network)
    assert not {*chain(*factors.items.indices)} & {*chain(*held_out.items.indices)}
    first, second = (task.training(network, epoch) for epoch in (0, 1))
    assert sorted(chain(*first.items.indices)) == sorted(chain(*second.items.indices)) == list(range(800))
    assert first.items.indices != second.items.indices
    torch.testing.assert_close(next(iter(first[5:6]))[0], list(first[:6])[5][0], rtol=0, atol=0)


def test_the_loss_is_the_sum_over_images_of_each_one_s_own(task, network):
    images, targets = next(iter(task.calibration(network)))
    alone = [{name: tensor[i : i + 1] for name, tensor in targets.items()} for i in range(4)]
    with torch.no_grad():
        features = network(images)
        together = task.loss(features, targets)
        parts = [task.loss(features.of_sample(i), one) for i, one in enumerate(alone)]
    torch.testing.assert_close(together, sum(parts), rtol=1e-6, atol=1e-6)  # float32


def test_sensitivity_of_a_detector_is_the_squared_error_of_its_coarsest_own_map(detection, detector):
    images = torch.randn(2, 3, 64, 64)
    seen = []
    hook = detector.neck.fpn_convs[3].conv.register_forward_hook(lambda *args: seen.append(args[2]))
    with torch.no_grad():
        original, changed = detector(images), detector(images + 0.1)
    hook.remove()
    expected = F.mse_loss(seen[1].double(), seen[0].double()) * 2  # two images
    torch.testing.assert_close(detection.output_error(original, changed), expected)


def test_sensitivity_of_a_segmenter_is_the_divergence_of_its_classes(segmentation, segmenters):
    network, images = segmenters["upernet_deit_b"], torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        original, changed = network(images), network(images + 0.1)
        p, q = (features.heads.decode_head(features.maps).double().softmax(1) for features in (original, changed))
    expected = (p * (p / q).log()).sum(dim=1).mean(dim=(1, 2)).sum()
    torch.testing.assert_close(segmentation.output_error(original, changed), expected)


def test_targets_become_the_library_s_samples_again(detection, detector):
    dataset = detection.dataset("train")
    _, targets = next(iter(detection.calibration(detector)))
    for index, sample in zip(detection.chosen_indices()["calibration"][:4], detection.samples(targets), strict=True):
        expected = dataset[index]["data_samples"].gt_instances
        assert sample.gt_instances.labels.tolist() == expected.labels.tolist()
        torch.testing.assert_close(sample.gt_instances.bboxes, expected.bboxes.tensor)
        assert (sample.gt_instances.masks.masks == expected.masks.masks).all()


def test_the_shipped_networks_are_good(detection, detector, segmentation, segmenters):
    found = detection.evaluate(detector)
    assert found["box_map"] > 50 and found["mask_map"] > 50
    assert all(0.1 < found[f"{name}_map_error"] < 5 for name in ("box", "mask"))
    for network in segmenters.values():
        found = segmentation.evaluate(network)
        assert found["miou"] > 50 and 0.1 < found["miou_error"] < 5


def test_the_error_of_the_miou_is_near_the_bootstraps(segmentation):
    """Of areas drawn for 200 images: their intersection and union, and those of prediction and truth, by class."""
    generator, metric = np.random.default_rng(0), segmentation.metric()
    metric.dataset_meta = segmentation.dataset("val").metainfo
    union = torch.from_numpy(generator.gamma(1, 50, (200, len(metric.dataset_meta["classes"]))))
    inside = union * torch.from_numpy(generator.beta(4, 2, union.shape))
    results = [(each, whole, each, whole) for each, whole in zip(inside, union, strict=True)]
    ours = jackknife_errors(partial(segmentation.computed, metric), results, NUM_GROUPS)["miou"]
    draws = generator.multinomial(200, [1 / 200] * 200, size=2000) @ np.stack([inside.numpy(), union.numpy()])
    assert ours == pytest.approx((100 * draws[0] / draws[1]).mean(axis=1).std(), rel=0.5)  # of ten groups: 0.24


def test_missing_and_too_few_data_are_clear_errors(tmp_path, detection):
    for kind, words in ((Coco, "COCO 2017, unpacked"), (ADE20K, "ADEChallengeData2016")):
        with pytest.raises(FileNotFoundError, match=words):
            kind(root=str(tmp_path), num_calibration=1, batch_size=1).inspect()
    with pytest.raises(ValueError, match="holds 800 training images"):
        replace(detection, num_calibration=800).inspect()


COLUMNS = {
    "detection": ["model=mask_rcnn_swin_b", "task=coco"],
    "segmentation": ["model=upernet_deit_b", "task=ade20k"],
}


@pytest.fixture(scope="module")
def few_scenes(tmp_path_factory):
    """A folder with fewer images, for whole epochs."""
    folder = tmp_path_factory.mktemp("few_scenes")
    scenes.scenes.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenes, "NUM_SCENES", {"train": 160, "test": 40})
        scenes.write_coco(folder / "coco")
        scenes.write_ade20k(folder / "ade20k")
    scenes.scenes.cache_clear()
    return folder


@pytest.fixture
def cell(make_cell, few_scenes):
    """A cell of one column, on the scenes that all tests share."""

    def build(column, *overrides):
        root = f"task.mini.root={few_scenes / COLUMNS[column][1].removeprefix('task=')}"
        return make_cell(*COLUMNS[column], "ratio=0.6", root, *overrides)

    return build


@pytest.mark.parametrize("column", COLUMNS)
def test_compressed_and_finetuned(cell, column):
    short = ["search=cors", "search.ratios=[0.3,0.6]", "task.mini.num_calibration=16", "task.mini.batch_size=80"]
    record = run_cell(cell(column, *short, f"finetuning={column}", "finetuning.mini.num_epochs=1"))
    assert record.status == "done"
    expected = {"detection": {"box_map", "mask_map_75", "gflops"}, "segmentation": {"miou", "mparams"}}
    assert expected[column] <= record.metrics.keys()
    assert all(name.startswith("backbone.") for name in record.plan)
    assert record.summary.spent["flops"] <= record.summary.budget["flops"]
    assert record.seconds.keys() >= {"decomposition", "search", "finetuning", "evaluation"}


def test_trained_in_stages(cell):
    epochs = ["stages.retraining.mini.num_epochs=1", "stages.training.mini.num_epochs=1", "task.mini.batch_size=80"]
    staged = cell("segmentation", "estimator=pela", "stages=pela", *epochs)
    record = run_cell(staged)
    assert record.status == "done" and record.plan
    assert record.seconds.keys() >= {"retraining", "finetuning"}
    dense = facts.count_cost(staged.model, staged.task.input_shape(staged.model))
    assert record.metrics["gflops"] < dense.flops / 1e9
    assert record.metrics["mparams"] < dense.params / 1e6
    assert run_cell(staged).attempt == record.attempt  # it is not run again


@pytest.fixture
def prepared(detection, detector):
    losses = {"loss": detection.loss, "output_error": detection.output_error}
    return facts.prepare(detector, detection.calibration(detector), **losses)


def test_a_detector_recovers(detection, detector, prepared):
    """A compressed detector learns from the original, without boxes."""
    options = {"epochs": 6, "batch_size": 2, "views": False}
    recovered = facts.recover(facts.compress(prepared, ratio=0.3), detection.calibration(detector), **options)
    course = recovered.summary.recovery
    assert (course.num_samples, course.num_to_choose, course.num_held_back) == (9, 3, 4)
    assert course.after < course.before


def test_a_loaded_detector_finds_the_same_boxes(detection, detector, prepared, tmp_path):
    result = facts.compress(prepared, form="pivoted", ratio=0.6)
    facts.save_compressed(result, tmp_path)
    image, (sample,) = next(iter(detection.evaluation(detector)))
    sizes = {name: sample.get(name) for name in ("img_shape", "ori_shape", "batch_input_shape", "pad_shape")}
    alone = DetDataSample(metainfo={**sizes, "scale_factor": (1.0, 1.0)})
    with torch.no_grad():
        (ours,) = result.model(image).predictions([sample])
        (theirs,) = facts.load_compressed(tmp_path).model(image).predictions([alone])
    assert len(ours.pred_instances) > 0
    for name in ("bboxes", "labels", "scores", "masks"):
        assert torch.equal(ours.pred_instances[name], theirs.pred_instances[name]), name


def test_a_detector_is_trained_once_and_found_by_its_configuration(cell_config, few_scenes, tmp_path):
    small = ["finetuning.mini.num_epochs=1", "task.mini.batch_size=80", f"task.mini.root={few_scenes / 'coco'}"]
    model = ["model=mask_rcnn_swin_b", f"model.mini.weights={tmp_path / 'trained.safetensors'}"]
    training = ["task=coco", "estimator=none", "finetuning=train_mask_rcnn_swin_b"]
    train(config := cell_config(*model, *training, *small))
    mini_recipe("mask_rcnn_swin_b", weights=str(tmp_path / "trained.safetensors")).build()
    with pytest.raises(FileExistsError, match=r"trained.safetensors exists: move it away"):
        train(config)


def test_a_classifier_is_not_trained_here(cell_config):
    with pytest.raises(ValueError, match="deit_b is not trained here: choose a detector"):
        train(cell_config("estimator=none", "finetuning=low_rank"))
