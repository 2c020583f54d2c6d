"""A small vision transformer whose units are to be narrowed."""

import pytest

import facts
from facts.estimators import SVDLLM
from facts.search import AllocationProblem
from tests.networks import image_batches, make_vit


@pytest.fixture
def problem() -> AllocationProblem:
    batches = image_batches([8, 8], shape=(3, 16, 16))
    calibration = facts.prepare(make_vit(), batches, held_out=(), parts="units")
    decompositions = calibration.decompositions(SVDLLM())
    return AllocationProblem(calibration, SVDLLM(), decompositions, {"flops": 0.5}, sensitivity=batches)
