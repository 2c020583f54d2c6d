"""An experiment in W&B: one artifact that holds all that its table and figure rest on."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from rich.console import Console

from experiments.config import Experiment, Tracking
from experiments.grid import GridCell
from experiments.output.artifact import publish
from experiments.output.results import link_of, show
from experiments.runner import open_cell, run_cell

pytestmark = pytest.mark.system

EXPERIMENT = Experiment(
    name="demo",
    title="A demonstration",
    metrics={"top1": "Top-1"},
    ranked_by="top1",
    axis_title="Ratio",
    figure="ablation",
    columns={"Net": []},
    rows={"a": [], "b": [], "c": []},
)


@pytest.fixture
def places(cell_config):
    """A cell that is done, one that failed, and one that has not run."""
    config = cell_config("estimator=pela")
    done = GridCell("demo", "a", "Net", config, "done", run_cell(open_cell(config)))
    return [done, GridCell("demo", "b", "Net", config, "failed"), GridCell("demo", "c", "Net", None)]


def shown(places, folder: Path, mode: str):
    config = SimpleNamespace(tracking=Tracking(mode=mode), profile=SimpleNamespace(comparable=False))
    show(EXPERIMENT, places, folder, config, Console(file=StringIO()))


def test_the_artifact_holds_table_figure_plans_and_records(places, tmp_path):
    folder = tmp_path / "results/mini"
    shown(places, folder, "disabled")
    (tmp_path / "run").mkdir()
    logged = []
    publish(SimpleNamespace(dir=str(tmp_path / "run/files"), log_artifact=logged.append), EXPERIMENT, places, folder)

    (artifact,) = logged
    assert (artifact.name, artifact.type) == ("demo-mini", "report")
    assert artifact.metadata["profile"] == "mini" and "torch" in artifact.metadata["versions"]
    assert artifact.metadata["cells"] == {"done": 1, "failed": 1, "missing": 1}
    record = places[0].record
    entries = artifact.manifest.entries
    assert entries.keys() == {
        *(f"tables/demo.{suffix}" for suffix in ("csv", "jsonl", "md", "tex")),
        *(f"figures/demo.{suffix}" for suffix in ("csv", "pdf", "png")),
        f"records/{record.fingerprint}.json",
        "plans.csv",
    }
    assert all(Path(entry.local_path).is_relative_to(tmp_path / "run") for entry in entries.values())
    held = Path(entries[f"records/{record.fingerprint}.json"].local_path)
    assert json.loads(held.read_text())["metrics"] == record.metrics
    plans = pd.read_csv(entries["plans.csv"].local_path)
    assert dict(zip(plans.layer, plans["rank"], strict=True)) == record.plan
    assert set(plans.row) == {"a"}

    for path in (folder / "tables").iterdir():
        path.write_text("a later table")
    assert "later" not in Path(entries["tables/demo.md"].local_path).read_text()


def test_an_offline_run_keeps_it_beside_the_results(places, tmp_path, caplog):
    shown(places, tmp_path / "results/mini", "offline")
    assert "W&B could not" not in caplog.text
    (run,) = (tmp_path / "results/mini/wandb").glob("offline-run-*")
    assert (run / "report/tables/demo.csv").exists()
    (table,) = (json.loads(path.read_text()) for path in run.glob("files/media/table/*.json"))
    (done, *others) = (dict(zip(table["columns"], row, strict=True)) for row in table["data"])
    record = places[0].record
    assert (done["row"], done["column"], done["metric"], done["status"]) == ("a", "Net", "top1", "done")
    assert (done["ours"], done["paper"], done["difference"]) == (record.metrics["top1"], None, None)
    assert (done["fingerprint"], done["run"]) == (record.fingerprint, "")  # the cell was run without W&B
    assert [row["status"] for row in others] == ["failed", "missing"]


def test_the_table_links_to_the_runs_of_its_cells(places):
    record = places[0].record
    tracked = replace(record, config=record.config | {"tracking": {"mode": "online"}}, attempt=2)
    online = SimpleNamespace(offline=False, project_url="https://wandb.ai/me/facts")
    offline = SimpleNamespace(offline=True)
    assert link_of(tracked, online) == f"https://wandb.ai/me/facts/runs/{record.fingerprint}-2"
    assert link_of(tracked, offline) == f"{record.fingerprint}-2"
    assert link_of(record, online) == link_of(None, online) == ""
