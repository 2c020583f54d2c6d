"""A compressed detector learns from the original, without boxes."""

import pytest

import facts
from tests.detection import installed  # noqa: F401

pytestmark = pytest.mark.external


def test_a_detector_recovers(detection, detector):
    calibration = detection.calibration(detector)
    losses = {"loss": detection.loss, "output_error": detection.output_error}
    result = facts.compress(detector, calibration, ratio=0.3, **losses)
    course = facts.recover(result, calibration, epochs=6, batch_size=2, views=False).summary.recovery
    assert course.num_samples + course.num_held_back == 16
    assert course.after < 0.8 * course.before
