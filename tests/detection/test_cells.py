"""Cells of the two tables, from a configuration to a record; a detector that recovers, and one in a folder."""

from tests.detection import installed  # noqa: F401, I001

import pytest
import torch
from mmdet.structures import DetDataSample

import facts
from experiments.doctor import needed_by
from experiments.runner import open_cell, run_cell
from facts.cost.count import count_cost
from facts.finetuning import Recovery, finetune, recovery

pytestmark = pytest.mark.external

SHORT = ["search.ratios=[0.3,0.6]", "task.mini.num_calibration=16"]
COLUMNS = {
    "detection": ["model=mask_rcnn_swin_b", "task=coco"],
    "segmentation": ["model=upernet_deit_b", "task=ade20k"],
}


@pytest.fixture
def cell(cell_config, few_scenes):
    """A cell of one column, on the scenes that all tests share."""

    def build(column, *overrides):
        root = f"task.mini.root={few_scenes / COLUMNS[column][1].removeprefix('task=')}"
        return open_cell(cell_config(*COLUMNS[column], "ratio=0.6", root, *overrides))

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


@pytest.mark.parametrize("column", COLUMNS)
def test_trained_in_stages(cell, column):
    epochs = ["stages.retraining.mini.num_epochs=1", "stages.training.mini.num_epochs=1", "task.mini.batch_size=80"]
    staged = cell(column, "estimator=pela", "stages=pela", *epochs)
    record = run_cell(staged)
    assert record.status == "done"
    assert record.seconds.keys() >= {"retraining", "finetuning"}
    assert record.plan
    dense = count_cost(staged.model, staged.task.input_shape(staged.model))
    assert record.metrics["gflops"] < dense.flops / 1e9
    assert record.metrics["mparams"] < dense.params / 1e6
    assert run_cell(staged).attempt == record.attempt  # it is not run again


def test_a_detector_recovers(detection, detector, monkeypatch):
    """A compressed detector learns from the original, without boxes."""
    calibration = detection.calibration(detector)
    losses = {"loss": detection.loss, "output_error": detection.output_error}
    result = facts.compress(facts.prepare(detector, calibration, **losses), ratio=0.3)
    recipe, outcomes = {"epochs": 6, "batch_size": 2, "views": False}, []
    course = facts.recover(result, calibration, **recipe).summary.recovery
    assert (course.num_samples, course.num_held_back) == (11, 4)  # and one image chooses the epoch
    assert course.after < course.before
    monkeypatch.setattr(recovery, "finetune", lambda *given: outcomes.append(finetune(*given)) or outcomes[-1])
    whole = facts.compress(facts.prepare(detector, calibration, held_out=(), **losses), ratio=0.3)
    Recovery(**recipe).teach(whole.model, detector, (calibration, ()), detection.output_error)
    assert min(outcomes[0].errors) < 0.8 * outcomes[0].errors[0]  # on the images that choose, with all others to learn


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


def test_the_doctor_looks_at_the_data_and_weights_of_stages_too(cell_config, tmp_path):
    cells = [
        cell_config(*overrides, "profile=paper", f"imagenet={tmp_path}", f"checkpoints={tmp_path}")
        for overrides in (COLUMNS["segmentation"], [*COLUMNS["segmentation"], "stages=pela"])
    ]
    findings = {each.what: each for cell in cells for each in needed_by(cell, set())}
    assert str(tmp_path) in findings["data of classification"].detail
    assert str(tmp_path) in findings["weights of upernet_deit_b's classifier"].detail


def test_operators_without_cuda_are_a_problem_on_a_gpu(cell_config, monkeypatch):
    config = cell_config(*COLUMNS["segmentation"], "hardware=cuda")
    for version, level in (("not available", "problem"), ("12.4", "fine")):
        monkeypatch.setattr("mmcv.ops.get_compiling_cuda_version", lambda version=version: version)
        packages = next(iter(needed_by(config, set())))
        assert (packages.what, packages.level) == ("packages of the extra detection", level)
