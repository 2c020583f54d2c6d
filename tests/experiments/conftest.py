"""Configurations of cells that are small, and leave nothing outside the test's own folder."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from experiments.config import CONF


@pytest.fixture
def cell_config(tmp_path: Path):
    """Composes a configuration of `run` from overrides, with its results in the test's folder and no tracking."""

    def build(*overrides: str) -> DictConfig:
        with initialize_config_dir(CONF, version_base="1.3"):
            return compose("config", overrides=[f"results={tmp_path / 'results'}", "tracking=off", *overrides])

    return build
