"""Sweeps over one results folder: killed, and two at once. No cell is run twice, and none lost."""

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from facts.utils.files import locked
from tests.process_group import process_group

pytestmark = pytest.mark.system

FOUR = ["estimator=pela,svd_llm", "ratio=0.3,0.4"]
RANDOM = ["model.mini.weights=random", "task.mini.num_calibration=64"]


@contextmanager
def sweep(results: Path, log: Path, *overrides: str) -> Iterator[subprocess.Popen]:
    """A sweep in a process of its own, which is killed at the end of the block unless it has ended."""
    command = [sys.executable, "-m", "experiments.run", "-m", "model=deit_b", "search=uniform", "tracking=off"]
    command += [*RANDOM, f"results={results}", *overrides]
    with log.open("w") as file, process_group(command, file) as process:
        yield process


def stamps(results: Path) -> dict[str, int]:
    """When the record of each finished cell was written; none has needed a second attempt."""
    paths = list((results / "mini/records").glob("*.json"))
    records = [json.loads(path.read_text()) for path in paths]
    assert all((record["status"], record["attempt"]) == ("done", 1) for record in records)
    return {path.stem: path.stat().st_mtime_ns for path in paths}


def runs(logs: Iterable[Path]) -> Counter[str]:
    """How often each cell was run."""
    return Counter(re.findall(r"\((\w{16})\) runs, attempt", "\n".join(log.read_text() for log in logs)))


@pytest.mark.attack
def test_of_a_killed_sweep_two_at_once_run_each_cell_that_is_left_and_the_data_pass_once(tmp_path):
    killed_log, *logs = (tmp_path / f"{number}.log" for number in (1, 2, 3))
    with sweep(tmp_path, killed_log, *FOUR) as killed:
        while not list((tmp_path / "mini/records").glob("*.json")) and killed.poll() is None:
            time.sleep(0.02)
    for path in (tmp_path / "mini/locks").glob("*.lock"):
        with locked(path):  # whoever held it is dead by now
            pass
    before = stamps(tmp_path)
    assert 1 <= len(before) < 4

    with sweep(tmp_path, logs[0], *FOUR) as first, sweep(tmp_path, logs[1], *FOUR) as second:
        assert (first.wait(), second.wait()) == (0, 0), "\n".join(log.read_text() for log in logs)
    after = stamps(tmp_path)
    assert len(after) == 4 and before.items() <= after.items()
    assert runs(logs) == dict.fromkeys(after.keys() - before.keys(), 1)
    began, *later = (log.read_text().count("data pass for") for log in (killed_log, *logs))
    assert sum(later) in ({0, 1} if began else {1})  # what the killed one began may be cached
    assert logs[1].read_text().count(": top1") == 4
