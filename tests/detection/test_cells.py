"""Cells of the two tables and the training of their networks; a detector that recovers, and one in a folder."""

from tests.detection import installed  # noqa: F401

# isort: split


import pytest
import torch
from mmdet.structures import DetDataSample

import facts
from experiments.mini.train import mini_recipe
from experiments.runner import run_cell
from experiments.train_dense import train
from facts.cost.count import count_cost

pytestmark = pytest.mark.external

SHORT = ["search.ratios=[0.3,0.6]", "task.mini.num_calibration=16"]
COLUMNS = {
    "detection": ["model=mask_rcnn_swin_b", "task=coco"],
    "segmentation": ["model=upernet_deit_b", "task=ade20k"],
}


@pytest.fixture
def cell(make_cell, few_scenes):
    """A cell of one column, on the scenes that all tests share."""

    def build(column, *overrides):
        root = f"task.mini.root={few_scenes / COLUMNS[column][1].removeprefix('task=')}"
        return make_cell(*COLUMNS[column], "ratio=0.6", root, *overrides)

    return build


@pytest.mark.parametrize("column", COLUMNS)
def test_compressed_and_finetuned(cell, column):
    finetuning = [f"finetuning={column}", "finetuning.mini.num_epochs=1", "task.mini.batch_size=80"]
    record = run_cell(cell(column, "search=cors", *SHORT, *finetuning))
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
    assert record.status == "done"
    assert record.seconds.keys() >= {"retraining", "finetuning"}
    assert record.plan
    dense = count_cost(staged.model, staged.task.input_shape(staged.model))
    assert record.metrics["gflops"] < dense.flops / 1e9
    assert record.metrics["mparams"] < dense.params / 1e6
    assert run_cell(staged).attempt == record.attempt  # it is not run again


def test_a_detector_recovers(detection, detector):
    """A compressed detector learns from the original, without boxes."""
    calibration = detection.calibration(detector)
    losses = {"loss": detection.loss, "output_error": detection.output_error}
    result = facts.compress(facts.prepare(detector, calibration, **losses), ratio=0.3)
    course = facts.recover(result, calibration, epochs=6, batch_size=2, views=False).summary.recovery
    assert (course.num_samples, course.num_to_choose, course.num_held_back) == (9, 3, 4)
    assert course.after < course.before


def test_a_loaded_detector_finds_the_same_boxes(detection, detector, tmp_path):
    calibration = detection.calibration(detector)
    losses = {"loss": detection.loss, "output_error": detection.output_error}
    result = facts.compress(facts.prepare(detector, calibration, **losses), form="pivoted", ratio=0.6)
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


@pytest.fixture
def config(cell_config, few_scenes, tmp_path):
    """The small detector's, whose weights are not there yet, on the scenes that tests share."""
    small = ["finetuning.mini.num_epochs=1", "task.mini.batch_size=80", f"task.mini.root={few_scenes / 'coco'}"]
    model = ["model=mask_rcnn_swin_b", f"model.mini.weights={tmp_path / 'trained.safetensors'}"]
    training = ["task=coco", "estimator=none", "finetuning=train_mask_rcnn_swin_b"]
    return cell_config(*model, *training, *small)


def test_a_detector_is_trained_once_and_found_by_its_configuration(config, tmp_path):
    train(config)
    mini_recipe("mask_rcnn_swin_b", weights=str(tmp_path / "trained.safetensors")).build()
    with pytest.raises(FileExistsError, match=r"trained.safetensors exists: move it away"):
        train(config)


def test_a_classifier_is_not_trained_here(cell_config):
    with pytest.raises(ValueError, match="deit_b is not trained here: choose a detector"):
        train(cell_config("estimator=none", "finetuning=low_rank"))
