"""Whichever of Python's operations on files fails, or however little room there is: the next run makes up for it.

safetensors writes its files itself, and meets only the lack of room.
"""

import errno
import itertools
import shutil

import pytest

import facts
from experiments.runner import open_cell, run_cell
from facts.utils.cache import content_key
from tests.attacks.faults import failing
from tests.disk import room_for
from tests.networks import image_batches, make_model

pytestmark = [pytest.mark.attack, pytest.mark.system]

BATCHES = image_batches([8] * 4)
RECOVERY = {"epochs": 2, "num_warmups": 0, "batch_size": 4, "views": False, "save_every": 3}
NUMBERS = (errno.ENOSPC, errno.EIO, errno.EACCES)
SIZES = (0, 1, 100, 1000, 3000, 10_000)  # bytes that a file may have


def compressed(cache, **options):
    result = facts.compress(make_model(), BATCHES, ratio=0.5, execution=facts.Execution(cache=cache), **options)
    return content_key(result.model, result.plan)


def searched(folder, cell_config):
    return compressed(search="cors", cache=folder / "cache")


def gfwsvd(folder, cell_config):
    return compressed(estimator="gfwsvd", cache=folder / "cache")


def recovered(folder, cell_config):
    result = facts.compress(make_model(), BATCHES, ratio=0.5, execution=facts.Execution(cache=folder / "cache"))
    result = facts.recover(result, BATCHES, cache=folder / "cache", **RECOVERY)
    return content_key(result.model, result.plan)


def cell(folder, cell_config):
    record = run_cell(open_cell(cell_config("estimator=svd_llm", "model.mini.weights=random", f"results={folder}")))
    return content_key(record.metrics, record.plan, record.outcomes)


def saved(folder, cell_config):
    """Over an older network."""
    dense = make_model()
    newer = facts.compress(dense, BATCHES, ratio=0.4)
    facts.save_compressed(newer, folder / "saved")
    return content_key(facts.load_compressed(folder / "saved", make_model()).model)


def older(folder):
    facts.save_compressed(facts.compress(make_model(), BATCHES, ratio=0.7), folder / "saved")


WORKS = {work.__name__: work for work in (searched, gfwsvd, recovered, cell, saved)}
STEPS = {"cell": 4, "recovered": 4}  # only one in so many operations of what takes seconds


@pytest.fixture
def again(tmp_path, cell_config):
    """A function that runs a work in a folder of its own: within `disturbance`, and then without."""

    def run(name, number, disturbance):
        folder = tmp_path / str(number)
        folder.mkdir()
        if name == "saved":
            older(folder)
        with disturbance(folder):
            try:
                first = WORKS[name](folder, cell_config)
            except OSError:
                first = None
        second = WORKS[name](folder, cell_config)
        shutil.rmtree(folder)
        assert first in (None, second)
        return first, second

    return run


@pytest.mark.parametrize("name", WORKS)
def test_an_operation_fails(name, again, tmp_path, cell_config, record_property):
    (tmp_path / "undisturbed").mkdir()
    if name == "saved":
        older(tmp_path / "undisturbed")
    with failing(tmp_path, None, 0) as fault:
        expected = WORKS[name](tmp_path / "undisturbed", cell_config)
    failures = []
    moments = range(0, fault.count, STEPS.get(name, 1))
    for at, number in zip(moments, itertools.cycle(NUMBERS), strict=False):
        first, second = again(name, at, lambda folder: failing(folder, at, number))  # noqa: B023
        assert second == expected
        failures.append(first is None)
    assert sum(failures) > len(moments) / 2  # the others were of files that may be missing, or are removed
    record_property("attacks", len(moments))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", WORKS)
def test_little_room(name, size, again, tmp_path, cell_config):
    expected = WORKS[name](tmp_path, cell_config)
    first, second = again(name, size, lambda folder: room_for(size))
    assert second == expected and (first is None or size > 0)
