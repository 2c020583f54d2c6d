"""Two who decompose the same network at once, as workers of one table do."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import facts
from facts.estimators import FACTS, GFWSVD
from facts.estimators.base import Estimator
from tests.networks import LAYERS, image_batches, make_model


@pytest.mark.parametrize("estimator", [FACTS(), GFWSVD()], ids=lambda estimator: type(estimator).__name__)
def test_the_second_waits_and_reads_what_the_first_has_found(tmp_path, monkeypatch, estimator: Estimator):
    """GFWSVD's gradients, which the first deletes, would be missing otherwise."""
    calls, factors = [], type(estimator).factors
    monkeypatch.setattr(type(estimator), "factors", lambda self, moments: calls.append(1) or factors(self, moments))
    prepared = [facts.prepare(make_model(), image_batches([3, 3]), cache=tmp_path) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda calibration: calibration.decompositions(estimator), prepared)
    assert len(calls) == len(LAYERS)
    for name in LAYERS:
        assert torch.equal(first[name].left, second[name].left)
        assert torch.equal(first[name].energies, second[name].energies)
