"""A table whose run is killed comes out alike, no cell is run twice, and none is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import experiments.reproduce
import experiments.reproduction
from experiments.compose import CONF

pytestmark = [pytest.mark.attack, pytest.mark.system]

NUM_CELLS = 4  # DeiT-B's Baseline, SVD-LLM, FACTS and FACTS + CoRS
LEFT_OUT = [f"columns.{name}-B" for name in ("Swin", "ConvNeXt", "MambaVision")]
LEFT_OUT += [f"rows.{name}" for name in ("FW-SVD", "ASVD", "GFWSVD", "FLAR-SVD", "PELA")]
TABLE = ["experiment=classification_50", *(f"~experiment.{part}" for part in LEFT_OUT)]
TABLE += ["task.mini.num_calibration=64", "tracking=off", "seeds=1"]


@contextmanager
def reproducing(results: Path, log: Path, *overrides: str) -> Iterator[subprocess.Popen]:
    """Make the table on one thread with its output in a log; what is left of the run at the end is killed."""
    command = [sys.executable, "-m", "experiments.reproduce", *TABLE, f"results={results}", *overrides]
    own = {"cwd": Path(CONF).parent, "start_new_session": True, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **own) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def stamps(results: Path) -> dict[str, int]:
    """When the record of each finished cell was written; none has needed a second attempt."""
    paths = list((results / "mini/records").glob("*.json"))
    records = [json.loads(path.read_text()) for path in paths]
    assert all((record["status"], record["attempt"]) == ("done", 1) for record in records)
    return {path.stem: path.stat().st_mtime_ns for path in paths}


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


def test_a_table_survives_a_kill(tmp_path, monkeypatch, capsys):
    """The process that began the workers is killed alone: they end by themselves, which it could not tell them.

    Of two that then run what is left at once, either runs a cell, but not both.
    """
    killed, undisturbed, *logs = (tmp_path / name for name in ("killed", "undisturbed", "0", "1", "2"))
    with reproducing(killed, logs[0], "workers=2") as process:
        while len(list((killed / "mini/records").glob("*.json"))) < 2:
            assert process.poll() is None, logs[0].read_text()
            time.sleep(0.02)
        process.kill()
        deadline = time.monotonic() + 60
        while are_alive_in(process.pid):
            assert time.monotonic() < deadline, "workers outlived the process that began them"
            time.sleep(0.1)
    before = stamps(killed)
    assert 2 <= len(before) < NUM_CELLS

    with reproducing(killed, logs[1], "part=0") as first, reproducing(killed, logs[2], "part=0") as second:
        ended = first.wait(), second.wait()
    printed = "\n".join(log.read_text() for log in logs[1:])
    assert ended == (0, 0), printed
    after = stamps(killed)
    assert len(after) == NUM_CELLS and before.items() <= after.items()
    assert Counter(re.findall(r"\((\w{16})\) runs, attempt", printed)) == dict.fromkeys(after.keys() - before.keys(), 1)
    assert "data pass for" in logs[0].read_text() and "data pass for" not in printed

    monkeypatch.setattr(experiments.reproduction, "report_on_all", lambda folder: None)
    for results in (killed, undisturbed):
        own = ["workers=1", f"results={results}", "hydra/job_logging=none"]
        monkeypatch.setattr(sys, "argv", ["reproduce", *TABLE, *own])
        experiments.reproduce.main()
        assert "report: " in capsys.readouterr().out
    assert stamps(killed) == after
    assert numbers(killed) == numbers(undisturbed)
    assert numbers(killed).count(",done,") > 7
