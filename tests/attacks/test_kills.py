"""A table comes out alike, byte for byte, however often the processes that make it are killed."""

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.config import CONF

pytestmark = [pytest.mark.attack, pytest.mark.system]

KILLS = 2
SECONDS = 10  # before a kill, on average
WORK = (
    "experiment=fisher_estimators",
    "~experiment.columns.Swin-B",
    "workers=2",
    "task.mini.num_calibration=128",
    "task.mini.num_factors_per_class=2",
    "task.mini.num_held_out_per_class=2",
)


def killed(results, seconds=None):
    """Make the table, and kill all processes after so many seconds; return whether they were still at work."""
    results.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "experiments.reproduce", "tracking=off", f"results={results}", *WORK]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (results / "log").open("a") as log:
        place, output = Path(CONF).parent, {"stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=place, env=environment, start_new_session=True, **output)
        try:
            assert process.wait(seconds) == 0, (results / "log").read_text()
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True
    return False


def table(results):
    """The text without what depends on the clock."""
    (path,) = (results / "mini/tables").glob("*.csv")
    return re.sub(r"^.*_minutes,.*\n", "", path.read_text(), flags=re.MULTILINE)


def test_a_table_survives_kills(tmp_path, record_property):
    killed(tmp_path / "undisturbed")
    moments, number = random.Random(0), 0
    for _ in range(KILLS):
        number += killed(tmp_path / "killed", moments.expovariate(1 / SECONDS))
    killed(tmp_path / "killed")
    assert number and table(tmp_path / "killed") == table(tmp_path / "undisturbed")
    assert table(tmp_path / "killed").count(",done,") > 7
    record_property("attacks", number)
