"""A table comes out alike, byte for byte, however its run is killed, and nothing that was done is done again."""

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import experiments.reproduce
from tests.process_group import process_group

pytestmark = [pytest.mark.attack, pytest.mark.system]

NUM_CELLS = 5
SECONDS = 0.5  # after a cell was done, before the kill, on average
FEW = ("num_calibration=128", "num_factors_per_class=2", "num_held_out_per_class=2")
LEFT_OUT = ("columns.Swin-B", "rows.KFAC-reduce", "rows.KFAC-expand")
TABLE = ["experiment=fisher_estimators", *(f"~experiment.{part}" for part in LEFT_OUT)]
TABLE += [f"task.mini.{few}" for few in FEW]


@contextmanager
def table(results: Path) -> Iterator[subprocess.Popen]:
    """The table is made by two workers; what is left of them at the end is killed, all processes together."""
    command = [sys.executable, "-m", "experiments.reproduce", "tracking=off", "workers=2", f"results={results}", *TABLE]
    with (results / "log").open("a") as log, process_group(command, log) as process:
        yield process


def stamps(results: Path) -> dict[str, int]:
    """When the record of each cell was written; all are done."""
    paths = list((results / "mini/records").glob("*.json"))
    assert all(json.loads(path.read_text())["status"] == "done" for path in paths)
    return {path.name: path.stat().st_mtime_ns for path in paths}


def wait_for_cells(process: subprocess.Popen, results: Path, number: int) -> None:
    while len(list((results / "mini/records").glob("*.json"))) < number:
        assert process.poll() is None, (results / "log").read_text()
        time.sleep(0.02)


def are_alive_in(group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, own_group, *_ = stat.read_text().rpartition(")")[2].split()
            if state != "Z" and int(own_group) == group:
                return True
    return False


def numbers(results: Path) -> str:
    """The table's text without what depends on the clock."""
    (path,) = (results / "mini/tables").glob("*.csv")
    return re.sub(r"^.*_minutes,.*\n", "", path.read_text(), flags=re.MULTILINE)


def test_a_table_survives_kills(tmp_path, monkeypatch, record_property):
    undisturbed, results = tmp_path / "undisturbed", tmp_path / "killed"
    results.mkdir()
    with table(results) as process:
        wait_for_cells(process, results, 2)
        process.kill()
        deadline = time.monotonic() + 60  # for its workers to end, which it could not tell
        while are_alive_in(process.pid):
            assert time.monotonic() < deadline, "workers outlived the process that began them"
            time.sleep(0.1)
    first = stamps(results)
    with table(results) as process:
        wait_for_cells(process, results, len(first) + 1)
        time.sleep(random.Random(0).expovariate(1 / SECONDS))
    second = stamps(results)
    assert 2 <= len(first) < len(second) < NUM_CELLS
    with table(results) as process:
        assert process.wait() == 0, (results / "log").read_text()
    last = stamps(results)
    assert len(last) == NUM_CELLS and first.items() <= second.items() <= last.items()
    assert "GFWSVD" in (results / "mini/report.md").read_text() and "Pairs apart" in (results / "log").read_text()

    options = ["tracking=off", "workers=1", f"results={undisturbed}", "hydra/job_logging=none"]
    monkeypatch.setattr(experiments.reproduce, "update_report", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["reproduce", *TABLE, *options])
    experiments.reproduce.main()
    assert numbers(results) == numbers(undisturbed)
    assert numbers(results).count(",done,") > 7
    record_property("attacks", 2)
