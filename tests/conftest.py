import gc
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hypothesis import settings
from omegaconf import DictConfig

from experiments.config import CONF
from tests.networks import image_batches, make_model

settings.register_profile("suite", deadline=None, max_examples=20, derandomize=True)
settings.load_profile("suite")


def pytest_addoption(parser):
    parser.addoption("--write-results", action="store_true", help="tests/photos write results/photos anew")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """What may take minutes comes first, so that of several workers none is left alone with it at the end."""
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("system", "external")))


def pytest_collection_finish():
    """What was imported stays: garbage collections, half a second each otherwise, need not look through it again."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """So does what the tests of a file leave behind: modules and caches of libraries."""
    if nextitem and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture
def model():
    return make_model()


@pytest.fixture
def batches():
    """Seven samples in batches of 3, 3 and 1."""
    return image_batches([3, 3, 1])


@pytest.fixture(autouse=True)
def one_seed():
    torch.manual_seed(0)


@pytest.fixture
def cell_config(tmp_path: Path):
    """Composes a configuration of `run` from overrides, on little data, with its results in the test's folder."""

    def build(*overrides: str) -> DictConfig:
        with initialize_config_dir(CONF, version_base="1.3"):
            own = [f"results={tmp_path / 'results'}", "tracking=off", "task.mini.num_calibration=128"]
            return compose("run", overrides=[*own, *overrides])

    return build


@pytest.fixture
def no_comparison(monkeypatch):
    """Without the last passes of a compression, which compare and time its outputs whatever the cache holds."""
    for measurement in ("with_distance", "with_latency"):
        monkeypatch.setattr(f"facts.compression.compress.{measurement}", lambda result, *_: result)
