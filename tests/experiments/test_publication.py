"""An experiment in W&B: one artifact that holds all that its table and figure rest on."""

import json
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import wandb
from rich.console import Console

from experiments.config import Experiment, Tracking
from experiments.grid import GridCell
from experiments.output.results import show
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


def test_an_offline_run_keeps_it_with_the_results(places, tmp_path, caplog, monkeypatch):
    artifacts: list[wandb.Artifact] = []
    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "log_artifact", lambda run, artifact: artifacts.append(artifact))
    shown(places, tmp_path / "results/mini", "offline")
    assert "W&B could not" not in caplog.text
    (run,) = (tmp_path / "results/mini/wandb").glob("offline-run-*")
    (artifact,) = (each for each in artifacts if each.type == "report")
    assert (artifact.name, artifact.type) == ("demo-mini", "report")
    assert artifact.metadata["cells"] == {"done": 1, "failed": 1, "missing": 1}
    assert artifact.manifest.entries.keys() == {
        *(f"tables/demo.{suffix}" for suffix in ("csv", "jsonl", "md", "tex")),
        *(f"figures/demo.{suffix}" for suffix in ("csv", "pdf", "png")),
        f"records/{places[0].record.fingerprint}.json",
        "plans.csv",
    }
    assert (run / "report/tables/demo.csv").exists()
    plans = pd.read_csv(run / "report/plans.csv")
    assert dict(zip(plans.layer, plans["rank"], strict=True)) == places[0].record.plan
    (table,) = (json.loads(path.read_text()) for path in run.glob("files/media/table/*.json"))
    (done, *others) = (dict(zip(table["columns"], row, strict=True)) for row in table["data"])
    record = places[0].record
    assert (done["row"], done["column"], done["metric"], done["status"]) == ("a", "Net", "top1", "done")
    assert (done["ours"], done["paper"], done["difference"]) == (record.metrics["top1"], None, None)
    assert (done["fingerprint"], done["run"]) == (record.fingerprint, "")  # the cell was run without W&B
    assert [row["status"] for row in others] == ["failed", "missing"]
