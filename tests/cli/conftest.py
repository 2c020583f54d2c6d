"""A command line in this process, images in folders, and a compressed network in a folder."""

import json

import pytest
from typer.testing import CliRunner, Result

from facts.cli import app
from tests.cli.pictures import write_images

VIT = ("timm/tiny_vit", "--weights", "random", "--num-classes", "3", "--num-workers", "0")


def saved(folder):
    return json.loads((folder / "compression.json").read_text())


@pytest.fixture
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
def compressed(tmp_path_factory, photos):
    """The output of `facts compress`, and the folder that it wrote."""
    folder = tmp_path_factory.mktemp("compressed") / "vit"
    arguments = ["compress", *VIT, "--data", str(photos), "--ratio", "0.4", "--out", str(folder)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result, folder
