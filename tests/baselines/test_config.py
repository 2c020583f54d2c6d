"""The baselines are found by their files, as a user's own methods are, and are rows of the ranking, or of units."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_class

import experiments.baselines
from experiments.config import CONF, instantiate

FILES = sorted(Path(experiments.baselines.__file__).parent.glob("*/*.yaml"))


@pytest.fixture(scope="module")
def rows():
    with initialize_config_dir(CONF, version_base="1.3"):
        tables = [compose("run", [f"experiment={table}"]).experiment for table in ("baselines", "units")]
    return [row for table in tables for row in table.rows.values()]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}={file.stem}")
def test_every_baseline_has_a_file_with_its_defaults_and_a_row(cell_config, rows, file):
    group, name = file.parent.name, file.stem
    node = cell_config(f"{group}={name}")[group]
    assert instantiate(node) == get_class(node["_target_"])()
    assert any(f"{group}={name}" in row for row in rows)
