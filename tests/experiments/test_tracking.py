"""W&B mirrors a run and never changes it."""

import sys
import time
from pathlib import Path

import pytest

from experiments.runner import open_cell, run_cell


@pytest.fixture
def offline(cell_config):
    return cell_config("estimator=pela", "tracking=offline")


def test_offline_runs_hold_config_metrics_and_plan(offline, tmp_path):
    record = run_cell(open_cell(offline))
    (log,) = (tmp_path / "results/mini/wandb").glob(f"offline-run-*/run-{record.fingerprint}-1.wandb")
    texts = (b"facts.estimators.PELA", b"top1", b"plan", b"gflops", "deit_b · pela · uniform · 0.5".encode())
    deadline = time.monotonic() + 60  # W&B's own process writes the file, on a busy machine after the run is over
    while not all(text in log.read_bytes() for text in texts) and time.monotonic() < deadline:
        time.sleep(0.1)
    content = log.read_bytes()
    for text in texts:
        assert text in content


def test_a_finished_cell_starts_no_run(offline, monkeypatch):
    run_cell(open_cell(offline))
    monkeypatch.setattr("wandb.init", lambda **kwargs: pytest.fail("W&B was started for a finished cell"))
    assert run_cell(open_cell(offline)).status == "done"


@pytest.mark.parametrize("stage", ["init", "log", "missing"])
def test_tracking_that_fails_changes_no_result(cell_config, offline, monkeypatch, caplog, stage):
    match stage:
        case "init":
            monkeypatch.setattr("wandb.init", lambda **kwargs: 1 / 0)
        case "log":
            monkeypatch.setattr("experiments.runner.log_record", lambda run, record: 1 / 0)
        case "missing":
            monkeypatch.setitem(sys.modules, "wandb", None)
    record = run_cell(open_cell(offline))
    assert record.status == "done" and "goes on without it" in caplog.text
    monkeypatch.undo()
    results = Path(offline.results).with_name("other")
    plain = run_cell(open_cell(cell_config("estimator=pela", f"results={results}")))
    assert plain.metrics == record.metrics and plain.fingerprint == record.fingerprint
