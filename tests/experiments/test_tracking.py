"""W&B mirrors a run and never changes it."""

import sys
from pathlib import Path

import pytest

from experiments.runner import open_cell, run_cell

pytestmark = pytest.mark.system


class Run:
    """A run that remembers what it is given."""

    def __init__(self, **start):
        self.start, self.history, self.summary, self.exit_code = start, [], {}, None

    def log(self, values):
        self.history.append(values)

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def runs(monkeypatch) -> list[Run]:
    started: list[Run] = []
    monkeypatch.setattr("wandb.init", lambda **start: started.append(Run(**start)) or started[-1])
    return started


@pytest.fixture
def offline(cell_config):
    return cell_config("estimator=pela", "tracking=offline", "tracking.entity=my-team")


def test_a_run_holds_config_metrics_plan_and_a_history_of_stages(offline, runs):
    record = run_cell(open_cell(offline))
    (run,) = runs
    assert (run.start["id"], run.start["name"]) == (f"{record.fingerprint}-1", "deit_b · pela · uniform · 0.5")
    assert list(run.start["tags"]) == ["deit_b", "pela", "uniform", "0.5"] and not run.start["group"]
    assert "facts.estimators.PELA" in str(run.start["config"]) and run.exit_code == 0
    assert (run.start["project"], run.start["entity"]) == ("facts", "my-team")
    assert record.metrics.items() <= run.summary.items()
    assert {f"seconds/{stage}": seconds for stage, seconds in record.seconds.items()}.items() <= run.summary.items()
    *stages, plan = run.history
    assert dict(plan["plan"].data) == record.plan
    names = [row["stage"] for row in stages]
    assert {"decomposition", "search"} < set(names) <= set(record.seconds) and names[-1] == "evaluation"
    assert all(row[f"seconds/{row['stage']}"] > 0 for row in stages)
    assert run_cell(open_cell(offline)).status == "done" and len(runs) == 1  # a finished cell starts no run


def test_a_failed_cell_is_a_failed_run(offline, runs, monkeypatch):
    monkeypatch.setattr("experiments.runner.measure", lambda cell: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_cell(open_cell(offline))
    (run,) = runs
    assert (run.exit_code, run.history) == (1, [])


@pytest.mark.parametrize("stage", ["log", "missing"])
def test_tracking_that_fails_changes_no_result(cell_config, offline, monkeypatch, caplog, stage):
    if stage == "log":
        monkeypatch.setattr("wandb.init", Run)
        monkeypatch.setattr("experiments.runner.log_record", lambda run, record: 1 / 0)
    else:
        monkeypatch.setitem(sys.modules, "wandb", None)
    record = run_cell(open_cell(offline))
    assert record.status == "done" and "goes on without it" in caplog.text
    monkeypatch.undo()
    results = Path(offline.results).with_name("other")
    plain = run_cell(open_cell(cell_config("estimator=pela", f"results={results}")))
    assert plain.metrics == record.metrics and plain.fingerprint == record.fingerprint
