"""Whole tables: killed and started again, with failing cells, and with one data pass for a column."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException

import experiments.columns
from experiments.cell import Cell
from experiments.columns import run_column, share_data_pass
from experiments.config import CONF, Experiment
from experiments.grid import GridCell, grid_of
from experiments.output.tables import entries_of, write_tables
from experiments.runner import open_cell
from facts.moments.collect import MomentPass

ROOT = Path(CONF).parent
NUM_CELLS = 2 * 7


def reproduce(results: Path) -> list[str]:
    command = [sys.executable, "-m", "experiments.reproduce", "experiment=fisher_estimators", "tracking=off"]
    return [*command, f"results={results}"]


def stamps(results: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (results / "mini/records").glob("*.json")}


def test_killed_at_any_moment_and_started_again_nothing_is_lost_or_repeated(tmp_path):
    results = tmp_path / "results"
    for enough in (1, 6):
        with subprocess.Popen(reproduce(results), cwd=ROOT, stderr=subprocess.DEVNULL) as process:
            while len(stamps(results)) < enough and process.poll() is None:
                time.sleep(0.02)
            os.kill(process.pid, signal.SIGKILL)
        before = stamps(results)
        assert enough <= len(before) < NUM_CELLS
        assert all(json.loads((results / "mini/records" / name).read_text())["status"] == "done" for name in before)

    done = subprocess.run(reproduce(results), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = stamps(results)
    assert len(after) == NUM_CELLS
    assert {name: after[name] for name in before} == before

    table = pd.read_csv(results / "mini/tables/fisher_estimators.csv")
    cells = table[table.metric.eq("top1") & table.row.ne("Spearman")]
    assert cells.status.value_counts().to_dict() == {"done": NUM_CELLS}
    assert table.difference.isna().all()
    assert len(table[table.row == "Spearman"]) == 2
    for suffix in ("md", "tex"):
        assert (results / f"mini/tables/fisher_estimators.{suffix}").exists()
    assert "GFWSVD" in (results / "mini/report.md").read_text()
    assert "KFAC-reduce" in done.stdout and "Spearman" in done.stdout


def place(config) -> GridCell:
    return GridCell("demo", "row", "column", config)


def test_one_failing_cell_does_not_lose_the_others(cell_config, monkeypatch):
    places = [place(cell_config(f"estimator={name}")) for name in ("pela", "svd_llm")]
    places.append(place(cell_config("estimator.shrinkage_row=3")))
    real = experiments.columns.run_cell

    def failing(cell: Cell, wait: bool):
        if type(cell.method.needed_estimator).__name__ == "PELA":
            raise RuntimeError("no luck")
        return real(cell, wait)

    monkeypatch.setattr(experiments.columns, "run_cell", failing)
    run_column(places)
    assert [p.status for p in places] == ["failed", "done", "failed"]
    assert places[1].record.metrics["top1"] > 10


def test_cells_that_failed_are_counted_at_the_end(tmp_path):
    command = [sys.executable, "-m", "experiments.reproduce", "experiment=sensitivity_interpolation", "tracking=off"]
    failing = ["model.mini.weights=nowhere.safetensors", "force=true", f"results={tmp_path}"]
    done = subprocess.run([*command, *failing], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "1 of 1 cells failed; their records say why. Run again to retry them." in done.stderr


def test_a_column_needs_one_data_pass_for_all_its_estimators(cell_config, monkeypatch):
    cells = [open_cell(cell_config(f"estimator={name}")) for name in ("facts", "kfac_expand", "gfwsvd", "asvd")]
    passes = []
    real = MomentPass.run

    def counted(self, calibration):
        passes.append(self)
        return real(self, calibration)

    monkeypatch.setattr("facts.moments.collect.MomentPass.run", counted)
    share_data_pass(cells)
    for cell in cells:
        experiments.columns.run_cell(cell)
    assert len(passes) == 1


def test_a_column_shares_a_data_pass_for_every_group_of_layers(cell_config, monkeypatch):
    at_once = "hardware.memory.layers_at_once=3"
    cells = [open_cell(cell_config(f"estimator={name}", at_once)) for name in ("facts", "gfwsvd", "pela")]
    passes = []
    real = MomentPass.run

    def counted(self, calibration):
        passes.append(list(self.layers))
        return real(self, calibration)

    monkeypatch.setattr("facts.moments.collect.MomentPass.run", counted)
    share_data_pass(cells)
    records = [experiments.columns.run_cell(cell) for cell in cells]
    assert len(passes) > 1 and max(map(len, passes)) == 3
    assert [name for group in passes for name in group] == list(records[0].plan)


def test_cells_that_keep_no_cache_share_no_pass_and_are_cells_of_their_own(cell_config):
    shared, alone = (open_cell(cell_config("estimator=facts", f"cache={cache}")) for cache in ("true", "false"))
    share_data_pass([alone])
    assert not (alone.folder / "cache").exists()
    assert shared.fingerprint != alone.fingerprint
    record = experiments.columns.run_cell(alone)
    assert not (alone.folder / "cache").exists()
    assert record.values["total_minutes"] * 60 == pytest.approx(
        record.seconds["decomposition"] + record.seconds["search"]
    )


def test_places_share_a_column_where_network_and_data_are_the_same(cell_config):
    data = [
        place(cell_config(*overrides)).data
        for overrides in (["ratio=0.4"], ["estimator=pela", "search=cors"], ["task.mini.num_calibration=64"])
    ]
    assert data[0] == data[1] != data[2]
    full_scale = [place(cell_config("profile=paper", f"seed={seed}")).data for seed in (0, 0, 1)]
    assert full_scale[0] == full_scale[1] != full_scale[2]


def test_a_cell_that_the_paper_leaves_out_is_shown_as_such(tmp_path):
    experiment = Experiment(
        name="demo",
        metrics={"top1": "Top-1"},
        ranked_by="top1",
        columns={"Net": []},
        rows={"ComCat": []},
        not_applicable={"ComCat": {"Net": "a reason"}},
    )
    (left_out,) = grid_of(experiment)
    assert (left_out.config, left_out.status) == (None, "n.a.")
    write_tables(experiment, entries_of(experiment, [left_out], comparable=True), tmp_path, {})
    assert "n.a." in (tmp_path / "demo.md").read_text()


def test_a_search_leaves_its_proof_in_the_record(cell_config):
    record = experiments.columns.run_cell(open_cell(cell_config("search=cors", "ratio=0.6")))
    summary = record.summary
    assert summary.solution["status"] == "optimal" and summary.solution["gap"] == 0
    assert summary.spent["flops"] <= summary.budget["flops"]
    assert record.metrics["gflops"] <= record.metrics["gflops_budget"]
    assert set(summary.profile) == set(record.plan)
    assert record.values["search_minutes"] > 0


def test_an_experiment_that_does_not_exist_is_refused_with_the_choices():
    with (
        initialize_config_dir(CONF, version_base="1.3"),
        pytest.raises(MissingConfigException, match=r"experiment/classification_55[^$]*classification_50"),
    ):
        compose("reproduce", ["experiment=classification_55"])
