"""Tables and sweeps whose runs are killed: they come out alike, no cell is run twice, and none is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest

import experiments.reproduce
from experiments.config import CONF
from facts.utils.files import locked

pytestmark = [pytest.mark.attack, pytest.mark.system]


@contextmanager
def process_group(command: list[Any], log: IO[str]) -> Iterator[subprocess.Popen]:
    """Run a command on one thread with its output in a log; what is left of it at the end is killed."""
    streams = {"stderr": subprocess.STDOUT, "start_new_session": True, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    with subprocess.Popen(command, cwd=Path(CONF).parent, stdout=log, **streams) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


NUM_CELLS = 4  # DeiT-B's Baseline, SVD-LLM, FACTS and FACTS + CoRS
LEFT_OUT = [f"columns.{name}-B" for name in ("Swin", "ConvNeXt", "MambaVision")]
LEFT_OUT += [f"rows.{name}" for name in ("FW-SVD", "ASVD", "GFWSVD", "FLAR-SVD", "PELA")]
TABLE = ["experiment=classification_50", *(f"~experiment.{part}" for part in LEFT_OUT)]
TABLE += ["task.mini.num_calibration=64", "tracking=off", "seeds=1"]


def stamps(results: Path) -> dict[str, int]:
    """When the record of each finished cell was written; none has needed a second attempt."""
    paths = list((results / "mini/records").glob("*.json"))
    records = [json.loads(path.read_text()) for path in paths]
    assert all((record["status"], record["attempt"]) == ("done", 1) for record in records)
    return {path.stem: path.stat().st_mtime_ns for path in paths}


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


FOUR = ["estimator=pela,svd_llm", "ratio=0.3,0.4"]
RANDOM = ["model.mini.weights=random", "task.mini.num_calibration=64"]


@contextmanager
def sweep(results: Path, log: Path, *overrides: str) -> Iterator[subprocess.Popen]:
    """A sweep in a process of its own, which is killed at the end of the block unless it has ended."""
    command = [sys.executable, "-m", "experiments.run", "-m", "model=deit_b", "search=uniform", "tracking=off"]
    command += [*RANDOM, f"results={results}", *overrides]
    with log.open("w") as file, process_group(command, file) as process:
        yield process


def runs(logs: Iterable[Path]) -> Counter[str]:
    """How often each cell was run."""
    return Counter(re.findall(r"\((\w{16})\) runs, attempt", "\n".join(log.read_text() for log in logs)))


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
