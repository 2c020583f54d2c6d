"""A small saved network, and a process that loads what was made of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.config import CONF
from tests.saving.setting import saved_vit


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
    return saved_vit(tmp_path_factory.mktemp("original"))


@pytest.fixture(scope="module")
def loader(original):
    loader = Loader(original)
    yield loader
    loader.process.communicate()
