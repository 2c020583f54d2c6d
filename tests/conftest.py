import gc
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hypothesis import settings
from omegaconf import DictConfig

from experiments.cell import Cell
from experiments.compose import CONF, composed
from tests.networks import image_batches, make_model

settings.register_profile("suite", deadline=None, max_examples=20, derandomize=True)
settings.load_profile("suite")


def pytest_collection_finish():
    """Exclude imports, which stay, from garbage collections, which would take half a second each otherwise."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Exclude what the tests of a file leave behind as well: modules and caches of libraries."""
    if nextitem and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Print how a worker of pytest-xdist ended that crashed."""
    if error:
        print(f"{node.gateway.id} ended with status {node.gateway._io.popen.wait(60)}")


@pytest.fixture
def model():
    return make_model()


@pytest.fixture
def batches():
    return image_batches([3, 3, 1])


@pytest.fixture(autouse=True)
def one_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def composing():
    """A context in which Hydra reads `conf/`: by one loader for all tests, which chooses the same files only once."""
    with initialize_config_dir(CONF, version_base="1.3"):
        loaded = GlobalHydra.instance().hydra

    @contextmanager
    def composing():
        GlobalHydra.instance().initialize(loaded)
        try:
            yield
        finally:
            GlobalHydra.instance().clear()

    return composing


@pytest.fixture
def cell_config(composing, tmp_path: Path):
    """A function that composes a configuration of `run`, on little data, with its results in the test's folder."""

    def build(*overrides: str) -> DictConfig:
        with composing():
            own = [f"results={tmp_path / 'results'}", "tracking=off", "task.mini.num_calibration=128"]
            return composed(*own, *overrides)

    return build


@pytest.fixture
def make_cell(cell_config):
    """A function that makes a cell, outside of any table, of such a configuration."""
    return lambda *overrides: Cell(cell_config(*overrides))


@pytest.fixture
def no_comparison(monkeypatch):
    """Skip the last passes of a compression, which compare and time its outputs whatever the cache holds."""
    for measurement in ("with_distance", "with_latency"):
        monkeypatch.setattr(f"facts.compression.compress.{measurement}", lambda result, *_: result)
