"""A table comes out alike, byte for byte, after its run was killed, and nothing that was done is done again."""

import json
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import experiments.reproduce
from tests.process_group import process_group

pytestmark = [pytest.mark.attack, pytest.mark.system]

NUM_CELLS = 5  # DeiT-B's Baseline, SVD-LLM, GFWSVD, FACTS and FACTS + CoRS
LEFT_OUT = [f"columns.{name}-B" for name in ("Swin", "ConvNeXt", "MambaVision")]
LEFT_OUT += [f"rows.{name}" for name in ("FW-SVD", "ASVD", "FLAR-SVD", "PELA")]
TABLE = ["experiment=classification_50", *(f"~experiment.{part}" for part in LEFT_OUT)]
TABLE += ["task.mini.num_calibration=64", "tracking=off", "seeds=1"]


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


def test_a_table_survives_a_kill(tmp_path, monkeypatch, capsys):
    """The process that began the workers is killed alone: they end by themselves, which it could not tell them."""
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    killed.mkdir()
    command = [sys.executable, "-m", "experiments.reproduce", *TABLE, "workers=2", f"results={killed}"]
    with (killed / "log").open("w") as log, process_group(command, log) as process:
        wait_for_cells(process, killed, 2)
        process.kill()
        deadline = time.monotonic() + 60
        while are_alive_in(process.pid):
            assert time.monotonic() < deadline, "workers outlived the process that began them"
            time.sleep(0.1)
    before = stamps(killed)
    assert 2 <= len(before) < NUM_CELLS

    monkeypatch.setattr(experiments.reproduce, "update_report", lambda *_: None)
    for results in (killed, undisturbed):
        own = ["workers=1", f"results={results}", "hydra/job_logging=none"]
        monkeypatch.setattr(sys, "argv", ["reproduce", *TABLE, *own])
        experiments.reproduce.main()
        assert "report: " in capsys.readouterr().out
    after = stamps(killed)
    assert len(after) == NUM_CELLS and before.items() <= after.items()
    assert numbers(killed) == numbers(undisturbed)
    assert numbers(killed).count(",done,") > 7
