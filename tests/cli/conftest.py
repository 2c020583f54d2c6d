"""A command line in this process, images in folders, and a compressed network in a folder."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from facts.cli import app

VIT = ("timm/tiny_vit", "--weights", "random", "--num-classes", "3", "--num-workers", "0")


def write_images(folder: Path, classes=("cat", "dog", "fox"), number=4, seed=0) -> Path:
    """Images of noise, `number` a class."""
    rng = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index in range(number):
            Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(folder / name / f"{index}.png")
    return folder


def saved(folder):
    return json.loads((folder / "compression.json").read_text())


@pytest.fixture(scope="session")
def run():
    """A function from arguments to the result of the command. Errors must be printed without a traceback."""

    def call(*arguments: object, code: int = 0) -> Result:
        words = [str(argument) for argument in arguments]
        result = CliRunner().invoke(app, words, prog_name="facts", env={"COLUMNS": "200"})
        assert result.exit_code == code, result.output
        return result

    return call


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="session")
def compressed(tmp_path_factory, photos, run):
    """The output of `facts compress`, and the folder that it wrote."""
    folder = tmp_path_factory.mktemp("compressed") / "vit"
    return run("compress", *VIT, "--data", photos, "--ratio", 0.4, "--out", folder), folder
