"""W&B mirrors a run and never changes it."""

import sys
from pathlib import Path

import pytest

from experiments.runner import open_cell, run_cell
from experiments.sweep import MOST_CHARACTERS, group_of
from tests.offline_runs import read_offline_run

pytestmark = pytest.mark.system


@pytest.fixture
def offline(cell_config):
    return cell_config("estimator=pela", "tracking=offline")


def offline_runs(folder: Path):
    return [read_offline_run(path) for path in folder.glob("mini/wandb/offline-run-*/*.wandb")]


def test_offline_runs_hold_config_metrics_plan_and_a_history_of_stages(offline, tmp_path):
    record = run_cell(open_cell(offline))
    (run,) = offline_runs(tmp_path / "results")
    assert (run.start.run_id, run.start.display_name) == (f"{record.fingerprint}-1", "deit_b · pela · uniform · 0.5")
    assert list(run.start.tags) == ["deit_b", "pela", "uniform", "0.5"] and not run.start.run_group
    assert "facts.estimators.PELA" in str(run.start.config)
    assert run.exit_code == 0
    assert record.metrics.items() <= run.summary.items()
    assert run.summary["plan/nrows"] == len(record.plan)

    *stages, plan = run.history
    assert plan["plan/nrows"] == len(record.plan)
    names = [row["stage"] for row in stages]
    assert {"decomposition", "search"} < set(names) <= set(record.seconds) and names[-1] == "evaluation"
    assert all(row[f"seconds/{row['stage']}"] > 0 for row in stages)
    assert {f"seconds/{stage}": seconds for stage, seconds in record.seconds.items()}.items() <= run.summary.items()
    before, last = stages[-2:]  # each is logged when it ends, and not with the others at the end of the run
    assert last["_timestamp"] - before["_timestamp"] >= 0.99 * record.seconds["evaluation"]


def test_every_epoch_is_logged_with_its_loss(cell_config, tmp_path):
    recovery = ["finetuning=recovery", "finetuning.mini.epochs=2", "finetuning.mini.views=false"]
    record = run_cell(
        open_cell(cell_config("estimator=pela", "tracking=offline", "tracking.group=mine", "ratio=0.3", *recovery))
    )
    (run,) = offline_runs(tmp_path / "results")
    assert run.start.run_group == "mine"
    first, second, end = (row for row in run.history if row.get("stage") == "finetuning")
    assert (first["epoch/finetuning"], second["epoch/finetuning"]) == (1, 2)
    assert first["loss/finetuning"] > second["loss/finetuning"] > 0
    assert second["error/finetuning"] == pytest.approx(record.summary.recovery.after, rel=1e-3)
    assert end["seconds/finetuning"] == pytest.approx(record.seconds["finetuning"])


def test_a_failed_cell_is_a_failed_run(offline, monkeypatch, tmp_path):
    monkeypatch.setattr("experiments.runner.measure", lambda cell: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_cell(open_cell(offline))
    (run,) = offline_runs(tmp_path / "results")
    assert (run.exit_code, run.history) == (1, [])


@pytest.mark.parametrize(
    ("overrides", "group"),
    [
        (["ratio=0.3,0.4", "results=/somewhere", "tracking=online", "tracking.project=x"], "ratio=0.3,0.4"),
        (["+note='${oc.env:HOME}'", "estimator=glob(*)"], "+note=___oc.env:HOME__ estimator=glob(*)"),
    ],
)
def test_groups_are_overrides_in_one_line(overrides, group):
    assert group_of(overrides) == group


def test_long_groups_are_cut_and_stay_distinct():
    long = ["ratio=" + ",".join(f"{number / 1000}" for number in range(100, 200))]
    first, second = group_of(long), group_of([*long, "seed=1"])
    assert len(first) == len(second) == MOST_CHARACTERS
    assert first != second


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
