"""An experiment in W&B: one artifact that holds all that its table and figure rest on."""

import json
from io import StringIO
from types import SimpleNamespace

import pandas as pd
import pytest
import wandb
from omegaconf import OmegaConf
from rich.console import Console

from experiments.config import Tracking
from experiments.grid import GridCell
from experiments.output.results import show
from experiments.runner import open_cell, run_cell
from tests.records import demo

pytestmark = pytest.mark.system

EXPERIMENT = OmegaConf.structured(demo(axis_title="Ratio", figure="ablation", rows={"a": [], "b": [], "c": []}))


def test_an_offline_run_keeps_it_with_the_results(cell_config, tmp_path, caplog, monkeypatch):
    """Of a cell that is done, one that failed, and one that has not run."""
    config = cell_config("estimator=pela")
    record = run_cell(open_cell(config))
    places = [GridCell("demo", "a", "Net", config, "done", record), GridCell("demo", "b", "Net", config, "failed")]
    places.append(GridCell("demo", "c", "Net", None))
    shown = SimpleNamespace(tracking=Tracking(mode="offline"), profile=SimpleNamespace(name="mini", comparable=False))
    artifacts: list[wandb.Artifact] = []
    settings: dict = {}

    def log_artifact(run, artifact):
        artifacts.append(artifact)
        settings.update(run.config, tags=run.tags)

    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "log_artifact", log_artifact)
    show(EXPERIMENT, places, tmp_path / "results/mini", shown, Console(file=StringIO()))
    assert "W&B could not" not in caplog.text
    (run,) = (tmp_path / "results/mini/wandb").glob("offline-run-*")
    (artifact,) = (each for each in artifacts if each.type == "report")
    assert (artifact.name, artifact.type) == ("demo-mini", "report")
    assert artifact.metadata["cells"] == {"done": 1, "failed": 1, "missing": 1}
    assert artifact.manifest.entries.keys() == {
        *(f"tables/demo.{suffix}" for suffix in ("csv", "jsonl", "md", "tex", "yaml")),
        *(f"figures/demo.{suffix}" for suffix in ("csv", "pdf", "png")),
        f"records/{record.fingerprint}.json",
        "plans.csv",
    }
    assert (run / "report/tables/demo.csv").exists()
    assert run.name.endswith("-result-mini-demo")
    assert settings["tags"] == ("demo", "mini") and settings["profile"] == "mini"
    assert settings["experiment"]["rows"] == {"a": [], "b": [], "c": []}
    plans = pd.read_csv(run / "report/plans.csv")
    assert dict(zip(plans.layer, plans["rank"], strict=True)) == record.plan
    (table,) = (json.loads(path.read_text()) for path in run.glob("files/media/table/*.json"))
    (done, *others) = (dict(zip(table["columns"], row, strict=True)) for row in table["data"])
    assert (done["row"], done["column"], done["metric"], done["status"]) == ("a", "Net", "top1", "done")
    assert (done["ours"], done["paper"], done["difference"]) == (record.metrics["top1"], None, None)
    assert (done["fingerprint"], done["run"]) == (record.fingerprint, "")  # the cell was run without W&B
    assert [row["status"] for row in others] == ["failed", "missing"]
