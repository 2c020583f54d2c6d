"""A compressed detector in a folder, and what a fresh process makes of it."""

from tests.detection import installed  # noqa: F401, I001

import subprocess
import sys

import pytest
import torch

import facts

pytestmark = pytest.mark.external

PREDICT = """
import sys, torch, facts
from mmdet.structures import DetDataSample

folder, exchanged = sys.argv[1:]
network = facts.load_compressed(folder).model
given = torch.load(exchanged)
sample = DetDataSample(metainfo={**given["sizes"], "scale_factor": (1.0, 1.0)})
with torch.no_grad():
    (found,) = network(given["image"]).predictions([sample])
torch.save({name: found.pred_instances[name] for name in ("bboxes", "labels", "scores", "masks")}, exchanged)
"""


def test_a_fresh_process_finds_the_same_boxes(detection, detector, tmp_path):
    calibration = detection.calibration(detector)
    losses = {"loss": detection.loss, "output_error": detection.output_error}
    result = facts.compress(detector, calibration, form="pivoted", ratio=0.6, **losses)
    facts.save_compressed(result, tmp_path / "saved")
    image, samples = next(iter(detection.evaluation(detector)))
    sizes = {name: samples[0].get(name) for name in ("img_shape", "ori_shape", "batch_input_shape", "pad_shape")}
    with torch.no_grad():
        (ours,) = result.model(image).predictions(samples)
    assert len(ours.pred_instances) > 0
    exchanged = tmp_path / "exchanged.pt"
    torch.save({"image": image, "sizes": sizes}, exchanged)
    subprocess.run([sys.executable, "-c", PREDICT, tmp_path / "saved", exchanged], check=True)
    for name, theirs in torch.load(exchanged).items():
        assert torch.equal(ours.pred_instances[name], theirs), name
