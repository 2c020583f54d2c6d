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
    parser.addoption("--write-results", action="store_true", help="tests/photos write results/vit_tiny anew")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """What takes minutes comes first, so that of several workers none is left alone with it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish():
    """What was imported stays: garbage collections, half a second each otherwise, need not look through it again."""
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
    """Composes a configuration of `run` from overrides, with its results in the test's folder and no tracking."""

    def build(*overrides: str) -> DictConfig:
        with initialize_config_dir(CONF, version_base="1.3"):
            return compose("config", overrides=[f"results={tmp_path / 'results'}", "tracking=off", *overrides])

    return build
