"""Output that fails: nothing computed is lost."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from facts.utils.streams import make_output_lasting
make_output_lasting()
for _ in range(3000):
    print("81 % ± 2, été", flush=True)
print("done", file=sys.stderr)
open(sys.argv[1], "w").write("saved")
"""


@pytest.mark.parametrize("where", ["a terminal in ASCII", "a closed pipe", "no output", "a full disk"])
def test_work_goes_on(where, tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "file")]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    shell = {"a closed pipe": '"$@" | head -c 1', "no output": '"$@" >&- 2>&-', "a full disk": '"$@" > /dev/full 2>&1'}
    text = shell.get(where, '"$@"')
    words = ["bash", "-o", "pipefail", "-c", text, "bash", *command]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == "saved"
    if where == "a terminal in ASCII":
        assert done.stdout.startswith("81 % ? 2, ?t?\n") and done.stderr == "done\n"
