"""A compressed detector in a folder."""

from tests.detection import installed  # noqa: F401, I001

import pytest
import torch
from mmdet.structures import DetDataSample

import facts

pytestmark = pytest.mark.external


def test_a_loaded_detector_finds_the_same_boxes(detection, detector, tmp_path):
    calibration = detection.calibration(detector)
    losses = {"loss": detection.loss, "output_error": detection.output_error}
    result = facts.compress(detector, calibration, form="pivoted", ratio=0.6, **losses)
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
