"""A disk that fills up: one clear error, nothing half written, and what was finished is kept."""

import pytest
import torch

from facts.moments import GradGram, InputGram, SampleGradEnergy, collect_moments
from facts.parts.layers import select_layers
from facts.utils.cache import Cache
from tests.disk import room_for

pytestmark = pytest.mark.attack


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def stamps(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def collect(model, batches, moments, cache):
    return collect_moments(model, select_layers(model).layers, batches, moments, cache=cache)


def test_a_moment_that_finds_no_room(model, batches, cache, caplog):
    caplog.set_level("INFO")
    moments = [SampleGradEnergy(), InputGram(), GradGram()]
    with room_for(4096), pytest.raises(OSError, match=r"no room for .*InputGram.*GiB are free.*: free"):
        collect(model, batches, moments, cache)
    kept = stamps(cache.folder)

    caplog.clear()
    found = collect(model, batches, moments, cache)
    assert "data pass for" in caplog.text and kept.items() <= stamps(cache.folder).items()
    for name, expected in collect(model, batches, moments, None).items():
        for moment in moments:
            assert all(map(torch.equal, found[name][moment], expected[moment]))
