"""Real photos of COCO, which are no part of the project, through everything that a detector goes through."""

from tests.detection import installed  # noqa: F401, I001

from dataclasses import replace
from pathlib import Path

import pytest

import facts
from experiments.mini.train import mini_recipe
from facts.finetuning import Finetuning, finetune
from facts.tasks.dense import Coco

ROOT = Path(__file__).parents[3] / "shared" / "data" / "coco_tiny"
pytestmark = [pytest.mark.external, pytest.mark.skipif(not ROOT.exists(), reason=f"no photos in {ROOT}")]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The photos as COCO 2017 is unpacked, at a quarter of its size."""
    root = tmp_path_factory.mktemp("coco")
    for name in ("train2017", "val2017"):
        (root / name).symlink_to(ROOT / "images" / name)
    (root / "annotations").symlink_to(ROOT / "annotations")
    return Coco(root=str(root), num_calibration=8, num_sensitivity=2, batch_size=2, scale=(333, 200), num_workers=0)


@pytest.fixture(scope="module")
def network():
    recipe = mini_recipe("mask_rcnn_swin_b")
    of_classes = {f"roi_head.{head}.num_classes": 80 for head in ("bbox_head", "mask_head")}
    return replace(recipe, weights="random", arguments={**recipe.arguments, **of_classes}).build()


def test_training_compression_and_evaluation(task, network):
    assert task.inspect().startswith("30 training and 6 validation images")  # two photos show nothing
    images, targets = next(iter(task.calibration(network)))
    assert images.shape[2:] == targets["masks"].shape[2:] and all(side % 32 == 0 for side in images.shape[2:])
    assert (targets["boxes"] <= targets["sizes"].flip(-1).repeat(1, 2)[:, None]).all()
    outcome = finetune(network, network, task, Finetuning(num_epochs=1, learning_rate=1e-4, alpha=0.0))
    assert outcome.losses[0] > 0
    losses = {"loss": task.loss, "output_error": task.output_error, "input_shape": task.input_shape(network)}
    prepared = facts.prepare(network, task.calibration(network), **losses)
    result = facts.compress(prepared, search="cors", ratio=0.6, sensitivity=task.sensitivity(network))
    assert result.summary.spent["flops"] <= result.summary.budget["flops"]
    assert result.summary.after.flops < result.summary.before.flops
    figures = task.evaluate(result.model)
    assert len(figures) == 6
    assert all(0 <= figure <= 100 or figure == -100 for figure in figures.values())  # -1: nothing of that size
