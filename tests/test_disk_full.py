"""A disk that fills up: one clear error, nothing half written, and what was finished is kept."""

from pathlib import Path

import pytest
import torch

import facts
from facts.moments import GradGram, InputGram, SampleGradEnergy, collect_moments
from facts.parts.layers import select_layers
from facts.utils.cache import Cache
from facts.utils.files import replacing
from tests.disk import room_for
from tests.networks import UNIFORM

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


def test_a_decomposition_that_finds_no_room_costs_no_other_data_pass(model, batches, tmp_path, caplog):
    caplog.set_level("INFO")
    facts.compress(model, batches, execution=facts.Execution(cache=tmp_path / "roomy"), **UNIFORM)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "roomy").rglob("*.safetensors")}
    name, size = max(sizes.items(), key=lambda item: item[1])
    assert name.startswith("FACTS-")
    with room_for(size - 1), pytest.raises(OSError, match=f"no room for .*{name}"):
        facts.compress(model, batches, execution=facts.Execution(cache=tmp_path / "cache"), **UNIFORM)
    kept = stamps(tmp_path / "cache")
    assert {path.name for path in kept} == sizes.keys() - {name} | {"data_pass.lock", f"{Path(name).stem}.lock"}

    caplog.clear()
    facts.compress(model, batches, execution=facts.Execution(cache=tmp_path / "cache"), **UNIFORM)
    assert "data pass" not in caplog.text
    assert kept.items() <= stamps(tmp_path / "cache").items()


def test_a_file_that_was_there_stays(tmp_path):
    path = tmp_path / "record.json"
    path.write_text("before")
    with room_for(4096), pytest.raises(OSError, match="no room for"), replacing(path) as temporary:
        temporary.write_text("after" * 1000)
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"] and path.read_text() == "before"
