"""W&B mirrors a run and never changes it; an experiment is one artifact with all that its table and figure rest on."""

import json
import sys
from io import StringIO
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from experiments.cell import Cell
from experiments.compose import composed
from experiments.config import Tracking
from experiments.output.results import show
from experiments.output.tracking import tracked
from experiments.runner import run_cell
from tests.records import demo

pytestmark = pytest.mark.system


def made_up(**start) -> Mock:
    """A run that remembers what it is given."""
    return Mock(spec=["log", "finish"], start=start, summary={})


@pytest.fixture
def runs(monkeypatch) -> list[Mock]:
    started: list[Mock] = []
    monkeypatch.setattr("wandb.init", lambda **start: started.append(made_up(**start)) or started[-1])
    return started


@pytest.fixture
def offline(make_cell):
    return make_cell("estimator=pela", "tracking=offline", "tracking.entity=my-team")


def test_a_run_holds_config_metrics_plan_and_a_history_of_stages(offline, runs):
    record = run_cell(offline)
    (run,) = runs
    assert (run.start["id"], run.start["name"]) == (f"{record.fingerprint}-1", "deit_b · pela · uniform · 0.5")
    assert list(run.start["tags"]) == ["deit_b", "pela", "uniform", "0.5"] and not run.start["group"]
    assert "facts.estimators.PELA" in str(run.start["config"])
    run.finish.assert_called_once_with(0)
    assert (run.start["project"], run.start["entity"]) == ("facts", "my-team")
    assert record.metrics.items() <= run.summary.items()
    assert {f"seconds/{stage}": seconds for stage, seconds in record.seconds.items()}.items() <= run.summary.items()
    *stages, plan = (call.args[0] for call in run.log.call_args_list)
    assert dict(plan["plan"].data) == record.plan
    names = [row["stage"] for row in stages]
    assert {"decomposition", "search"} < set(names) <= set(record.seconds) and names[-1] == "evaluation"
    assert all(row[f"seconds/{row['stage']}"] > 0 for row in stages)
    assert run_cell(offline).status == "done" and len(runs) == 1  # a finished cell starts no run


def test_a_failed_cell_is_a_failed_run(offline, runs, monkeypatch):
    monkeypatch.setattr("experiments.runner.measure", lambda cell: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_cell(offline)
    (run,) = runs
    run.finish.assert_called_once_with(1)
    run.log.assert_not_called()


@pytest.mark.parametrize("stage", ["log", "missing"])
def test_tracking_that_fails_changes_no_result(make_cell, offline, monkeypatch, caplog, stage):
    if stage == "log":
        monkeypatch.setattr("wandb.init", made_up)
        monkeypatch.setattr("experiments.runner.log_record", lambda run, record: 1 / 0)
    else:
        monkeypatch.setitem(sys.modules, "wandb", None)
    record = run_cell(offline)
    assert record.status == "done" and "goes on without it" in caplog.text
    monkeypatch.undo()
    plain = run_cell(make_cell("estimator=pela", f"results={offline.config.results}_apart"))
    assert plain.metrics == record.metrics and plain.fingerprint == record.fingerprint


@pytest.mark.parametrize(
    ("override", "environment", "mode"),
    [
        ("", {}, "offline"),
        ("", {"WANDB_MODE": "disabled"}, "disabled"),
        ("", {"WANDB_MODE": "dryrun"}, "offline"),
        ("", {"WANDB_DISABLED": "true"}, "disabled"),
        ("tracking=offline", {"WANDB_MODE": "disabled"}, "offline"),  # chosen by somebody
    ],
)
def test_the_environment_chooses_if_nobody_else_does(composing, monkeypatch, override, environment, mode):
    for name, value in {**environment, "WANDB_PROJECT": "mine"}.items():
        monkeypatch.setenv(name, value)
    with composing():
        tracking = composed(*override.split()).tracking
    assert (tracking.mode, tracking.project, tracking.group) == (mode, "mine", None)


def test_one_offline_run_of_an_id_is_left_with_tags_as_short_as_tags_must_be(tmp_path):
    """A sync would upload all, in any order."""
    tags = []
    older, other = (tmp_path / f"wandb/offline-run-20200101_000000-{name}" for name in ("id", "other-id"))
    older.mkdir(parents=True)
    other.mkdir()
    with tracked(Tracking(mode="offline"), tmp_path, "id", tags=["a" * 100, "b"]) as tell:
        tell(lambda run: tags.extend(run.tags))
        assert older.exists() and tags == ["a" * 64, "b"]
    (left,) = {*(tmp_path / "wandb").glob("offline-run-*")} - {other}
    assert left.name.endswith("-id") and left != older


def test_an_offline_run_keeps_it_with_the_results(cell_config, tmp_path, caplog, monkeypatch):
    """One cell is done, one failed, and one has not run."""
    experiment = OmegaConf.structured(demo(axis_title="Ratio", figure="ablation", rows={"a": [], "b": [], "c": []}))
    config, settings = cell_config("estimator=pela"), {}
    record = run_cell(Cell(config))
    places = [Cell(config, "demo", "a", "Net", record=record), Cell(config, "demo", "b", "Net", error="no luck")]
    shown = SimpleNamespace(tracking=Tracking(mode="offline"), profile=SimpleNamespace(name="mini", comparable=False))
    log_artifact = "wandb.sdk.wandb_run.Run.log_artifact"
    monkeypatch.setattr(log_artifact, lambda run, artifact: settings.update(run.config, tags=run.tags))
    show(experiment, places, tmp_path / "results/mini", shown, Console(file=StringIO()))
    assert "W&B could not" not in caplog.text
    (run,) = (tmp_path / "results/mini/wandb").glob("offline-run-*")
    assert run.name.endswith("-result-mini-demo")
    assert (settings["tags"], settings["profile"]) == (("demo", "mini"), "mini")
    assert settings["experiment"]["rows"] == {"a": [], "b": [], "c": []}
    (table,) = (json.loads(path.read_text()) for path in run.glob("files/media/table/*.json"))
    (done, *others) = (dict(zip(table["columns"], row, strict=True)) for row in table["data"])
    assert (done["row"], done["column"], done["metric"], done["status"]) == ("a", "Net", "top1", "done")
    assert (done["ours"], done["paper"], done["difference"]) == (record.metrics["top1"], None, None)
    assert done["fingerprint"] == record.fingerprint
    assert [row["status"] for row in others] == ["failed", "missing"]
