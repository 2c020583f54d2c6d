"""Each hostile folder is refused, within a second of a processor and 100 MiB, measured in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import facts
from experiments.config import CONF
from facts.models import TimmModel
from tests.attacks.hostile_folders import ATTACKS, RAN

SECONDS, MEBIBYTES = 1, 100
VIT = {"img_size": 32, "patch_size": 16, "depth": 1, "embed_dim": 48, "num_heads": 2, "num_classes": 5}


class Loader:
    """The process that loads. One that an attack has ended is replaced by another."""

    def __init__(self, original):
        self.original, self.process = original, None

    def load(self, folder):
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, "-m", "tests.attacks.loader", str(self.original)]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=self.original.parent,
                env={**os.environ, "PYTHONPATH": str(Path(CONF).parent)},
            )
            assert self.process.stdout.readline() == "ready\n"
        self.process.stdin.write(f"{folder}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"outcome": f"the process ended with {self.process.wait()}"}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    model = TimmModel(tag="vit_tiny_patch16_224", arguments=VIT, weights="random").build()
    facts.save_compressed(facts.compress(model, estimator="pela", input_shape=(3, 32, 32)), folder)
    return folder


@pytest.fixture(scope="module")
def loader(original):
    loader = Loader(original)
    yield loader
    loader.process.communicate()


def test_an_unchanged_folder_is_loaded(original, loader):
    assert loader.load(original)["outcome"] == "loaded"


@pytest.mark.parametrize("attack", ATTACKS)
def test_it_is_refused_at_once(attack, original, loader, tmp_path):
    (tmp_path / "secret").write_text("mine")
    folder = shutil.copytree(original, tmp_path / "saved")
    ATTACKS[attack](folder)
    result = loader.load(folder)
    assert result["outcome"].startswith("refused: ") and "\n" not in result["outcome"], result["outcome"][:500]
    assert not (original.parent / RAN).exists()
    assert result["seconds"] < SECONDS and result["mebibytes"] < MEBIBYTES, result
