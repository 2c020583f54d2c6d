"""The order in which cells run, that it makes no difference who runs them, the workers that do, and their lock."""

import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from itertools import accumulate, chain, product
from pathlib import Path

import pandas as pd
import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from experiments.cell import Cell
from experiments.compose import CONF
from experiments.grid import warn_of_misspelt_metrics
from experiments.report import main as report
from experiments.reproduce import main as reproduce
from experiments.runner import exclusive_lock, reason_of, shared_lock
from experiments.workers import finished, line_of_each, run_tables
from tests.experiments.conftest import SMALL
from tests.records import demo, make_record
from tests.refusals import refuses

KILLER = """
import os, signal, sys, threading, time
def watch():
    while not os.path.exists({marker!r}):
        if "experiments.workers" in sys.modules and sys.argv[0].endswith("default_worker.py"):
            open({marker!r}, "x")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
threading.Thread(target=watch, daemon=True).start()
"""


def cell(experiment: str, network: str, row: str) -> Cell:
    fields = {"profile": {"name": "mini"}, "labels": "given", "excluded_names": [], "results": "results"}
    config = OmegaConf.create({**fields, "model": {"mini": {"name": network}}, "task": {"mini": {}}})
    return Cell(config, experiment, row, network)


def table(experiment: str, *rows: str) -> list[Cell]:
    """Rows of two networks, as `cells_of` makes them: row by row."""
    return [cell(experiment, network, row) for row in rows for network in ("DeiT", "Swin")]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_each_part_runs_once_in_order_and_its_records_come_back(monkeypatch, num_workers):
    """Of four tables, the last has nothing to run; the runs are made up."""
    tables, steps = [table("first", "A", "B"), table("second", "A", "B"), table("third", "A"), []], []

    def share_data_pass(cells: list[Cell]) -> None:
        steps.append((cells[0].experiment, cells[0].column, "".join(cell.row for cell in cells)))

    def run_cell(cell: Cell, wait: bool) -> None:
        cell.record = make_record(f"{cell.experiment}/{cell.row}/{cell.column}")

    monkeypatch.setattr("experiments.runner.share_data_pass", share_data_pass)
    monkeypatch.setattr("experiments.runner.run_cell", run_cell)
    monkeypatch.setattr(Cell, "runs_alone", False)
    monkeypatch.setattr("experiments.runner.shared_lock", lambda folder: nullcontext())
    with ThreadPoolExecutor(num_workers) as pool:

        def copied(task, parts):
            return pool.map(task, [pickle.loads(pickle.dumps(part)) for part in parts])

        assert [*run_tables(tables, copied)] == tables
    for each in (each for cells in tables for each in cells):
        assert (each.status, each.record.fingerprint) == ("done", f"{each.experiment}/{each.row}/{each.column}")
    rows = {"first": "AB", "second": "AB", "third": "A"}
    expected = [(name, network, rows[name]) for name, network in product(rows, ("DeiT", "Swin"))]
    assert (steps if num_workers == 1 else sorted(steps)) == expected


def test_a_cell_that_has_run_has_a_line_with_its_value_its_seconds_and_the_time_left(caplog):
    """One that was done before has none."""
    caplog.set_level("INFO")
    cells = table("first", "A", "B")
    cells[0].record = make_record()
    tell = line_of_each([cells, table("second", "A")])
    for each in cells[:3]:
        each.config.experiment = {"ranked_by": "top1"}
        each.record = make_record(metrics={"top1": 50.25}, seconds={"search": 2.0, "evaluation": 1.0})
        tell(each)
    cells[3].config.experiment, cells[3].error = {"ranked_by": "top1"}, "no luck"
    tell(cells[3])
    assert [re.sub(r"\d:\d\d:\d\d", "0:00:00", line) for line in caplog.messages] == [
        "first, 2 of 4: A, Swin: top1 50.25, 3 s; 0:00:00 left",
        "first, 3 of 4: B, DeiT: top1 50.25, 3 s; 0:00:00 left",
        "first, 4 of 4: B, Swin: failed; 0:00:00 left",
    ]


def test_a_metric_that_is_much_like_one_of_ours_is_named_before_any_work(composing, caplog):
    """A distance is measured on photos alone."""
    with composing():
        known = {"gflops": "GFLOPs", "distance": "Distance"}
        warn_of_misspelt_metrics([demo(metrics={"top_1": "Top-1", "carbon": "CO2", **known})])
    assert caplog.messages == ["demo: no table of ours has the metric top_1: is top1 meant?"]


def test_an_error_in_code_is_told_with_its_type_and_place_and_one_of_the_user_without():
    with pytest.raises(KeyError) as wrong:
        {}["x"]
    wrong.value.add_note("see r.json")
    assert re.fullmatch(rf"KeyError: 'x' \({re.escape(__file__)}, line \d+\); see r.json", reason_of(wrong.value))
    assert reason_of(ValueError("ratio must be below 1")) == "ratio must be below 1"


def die_once(part: list[Cell]) -> list[Cell]:
    """Run a part in a worker, which leaves a file for its GPU; the first to come to the second network is killed."""
    Path(f"gpu {os.environ['CUDA_VISIBLE_DEVICES']}").touch()
    time.sleep(1)  # for the other worker to begin too
    for each in part:
        each.record = make_record(each.row)
    if part[0].column == "Swin" and not os.path.exists("died"):
        Path("died").touch()
        time.sleep(1)  # for what the other has done to arrive
        os.kill(os.getpid(), signal.SIGKILL)
    return part


@pytest.mark.system
@pytest.mark.attack
def test_what_a_killed_worker_leaves_is_done_by_others(monkeypatch, tmp_path, caplog):
    """Each in the folder of the process that started it, with a GPU of its own."""
    monkeypatch.setattr(HydraConfig, "get", lambda: OmegaConf.create({"job_logging": {"version": 1}}))
    monkeypatch.setattr("experiments.workers.run_part", die_once)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.chdir(tmp_path)
    tables = [[cell("first", "DeiT", "A")], [cell("second", "Swin", "A")]]
    assert [*finished(tables, 2, "cuda")] == tables
    assert {path.name for path in tmp_path.iterdir()} == {"died", "gpu 5", "gpu 7"}
    assert {cell.status for cells in tables for cell in cells} == {"done"}
    assert caplog.text.count("a worker died") == 1


@pytest.mark.system
def test_jobs_of_a_launcher_run_the_parts_and_the_report_draws_them(command, monkeypatch, tmp_path):
    """The table of throughput, whose two cells are timed, of networks without weights."""
    given = ["experiment=throughput", *SMALL, "hardware.timing.num_turns=2", "hardware.timing.min_seconds=0"]
    joblib = ["hydra/launcher=joblib", *given]
    refuses(r"as jobs: add -m 'part=range\(2\)'", command, reproduce, *joblib, raised=SystemExit)
    command(reproduce, "-m", *joblib, "hydra.launcher.n_jobs=1", "part=range(2)")
    assert len(list(tmp_path.glob("mini/records/*.json"))) == 2 and not (tmp_path / "mini/tables").exists()
    refuses("part must be from 0 to 1, got 2", command, reproduce, "part=2", *given, raised=SystemExit)
    monkeypatch.setattr("experiments.report.report_on_all", lambda folder: None)
    command(report, *given)
    here = pd.read_csv(tmp_path / "mini/tables/throughput.csv").query("row == 'This device'")
    assert len(here) == 6 and (here.status == "done").all() and here.fingerprint.nunique() == 2


@pytest.mark.system
@pytest.mark.attack
def test_ray_runs_a_part_again_whose_process_was_killed(tmp_path):
    pytest.importorskip("ray", reason="Ray is an extra of its own: pip install -e '.[ray]'")
    command = [sys.executable, "-m", "experiments.reproduce", "-m", "experiment=sensitivity_interpolation", *SMALL]
    command += ["task.mini.num_sensitivity=8", "tracking=off", "part=0"]
    command += ["hydra/launcher=ray", "+hydra.launcher.ray.init.include_dashboard=false"]
    killer = tmp_path / "sitecustomize.py"  # kills the first process of Ray that runs a part
    killer.write_text(KILLER.format(marker=str(tmp_path / "marker")))
    own = {"cwd": Path(CONF).parent, "env": os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(CONF).parent}"}}
    done = subprocess.run([*command, f"results={tmp_path}"], capture_output=True, text=True, **own)
    assert done.returncode == 0 and (tmp_path / "marker").exists(), done.stderr
    assert len(list(tmp_path.glob("mini/records/*.json"))) == 1


def work(folder, measures):
    """Two cells, of which each measures time in its middle if it is to."""
    steps, measurements = [], []
    for _ in range(2):
        with shared_lock(folder):
            steps.append((time.monotonic(), +1))
            time.sleep(0.1)
            if measures:
                steps.append((time.monotonic(), -1))
                with exclusive_lock():
                    start = time.monotonic()
                    time.sleep(0.2)
                    measurements.append((start, time.monotonic()))
                steps.append((time.monotonic(), +1))
            time.sleep(0.1)
            steps.append((time.monotonic(), -1))
    return steps, measurements


def test_nothing_runs_beside_a_measurement(tmp_path):
    (tmp_path / "locks").mkdir()
    with ProcessPoolExecutor(3, multiprocessing.get_context("fork")) as pool:
        found = [*pool.map(work, [tmp_path] * 3, (True, True, False), timeout=30)]
    steps, measurements = ([*chain(*parts)] for parts in zip(*found, strict=True))
    steps.sort()
    assert len(steps) == 2 * (4 + 4 + 2) and len(measurements) == 4
    for start, end in measurements:
        assert sum(change for at, change in steps if at < start) == 0
        assert not [at for at, _ in steps if start < at < end]
        assert not [other for other in measurements if start < other[0] < end]
    assert max(accumulate(change for _, change in steps)) > 1
