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
from omegaconf import OmegaConf

import experiments.columns
from experiments.cell import Cell
from experiments.columns import run_cells, share_data_pass
from experiments.config import CONF, Experiment
from experiments.grid import GridCell, grid_of
from experiments.outcomes import unpacked
from experiments.output.tables import entries_of, write_tables
from experiments.runner import open_cell
from facts.moments.collect import MomentPass

pytestmark = pytest.mark.system

ROOT = Path(CONF).parent
NUM_CELLS = 2 * 7


# A network that needs no weights, and few images.
SMALL = ["model.mini.weights=random", "task.mini.num_calibration=64"]


def reproduce(results: Path) -> list[str]:
    command = [sys.executable, "-m", "experiments.reproduce", "experiment=fisher_estimators", "tracking=off"]
    few = [
        f"task.mini.{field}" for field in ("num_calibration=128", "num_factors_per_class=2", "num_held_out_per_class=2")
    ]
    return [*command, *few, "workers=2", f"results={results}"]


def stamps(results: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (results / "mini/records").glob("*.json")}


def wait_for_the_end(group: int) -> None:
    """Wait until a killed process has no workers left, which it could not tell to end."""
    deadline = time.monotonic() + 60
    while left := [stat for stat in Path("/proc").glob("[0-9]*/stat") if is_alive_in(group, stat)]:
        if time.monotonic() > deadline:
            os.killpg(group, signal.SIGKILL)
            pytest.fail(f"{len(left)} workers outlived the process that began them")
        time.sleep(0.1)


def is_alive_in(group: int, stat: Path) -> bool:
    try:
        state, _, own_group, *_ = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return state != "Z" and int(own_group) == group


@pytest.mark.attack
def test_killed_at_any_moment_and_started_again_nothing_is_lost_or_repeated(tmp_path):
    results = tmp_path / "results"
    for enough in (1, 6):
        with subprocess.Popen(
            reproduce(results), cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True
        ) as process:
            while len(stamps(results)) < enough and process.poll() is None:
                time.sleep(0.02)
            os.kill(process.pid, signal.SIGKILL)
        wait_for_the_end(process.pid)
        before = stamps(results)
        assert enough <= len(before) < NUM_CELLS
        assert all(json.loads((results / "mini/records" / name).read_text())["status"] == "done" for name in before)

    done = subprocess.run(reproduce(results), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = stamps(results)
    assert len(after) == NUM_CELLS
    assert {name: after[name] for name in before} == before

    table = pd.read_csv(results / "mini/tables/fisher_estimators.csv")
    cells = table[table.metric.eq("top1") & ~table.row.isin(["Spearman", "Pairs apart"])]
    assert cells.status.value_counts().to_dict() == {"done": NUM_CELLS}
    assert table.difference.isna().all()
    assert cells.standard_error.between(0.1, 1).all()
    assert table[table.row == "Spearman"]["count"].tolist() == [6, 6]
    pairs = table[table.row == "Pairs apart"]
    assert pairs["count"].tolist() == [15, 15] and pairs.ours.between(0, 15).all()
    for suffix in ("md", "tex"):
        assert (results / f"mini/tables/fisher_estimators.{suffix}").exists()
    assert "GFWSVD" in (results / "mini/report.md").read_text()
    assert all(row in done.stdout for row in ("KFAC-reduce", "Spearman", "Pairs apart"))


def place(config) -> GridCell:
    return GridCell("demo", "row", "column", config)


@pytest.fixture
def small(cell_config):
    """A function that makes a cell of a network with random weights from an estimator and other overrides."""
    return lambda estimator, *overrides: place(cell_config(f"estimator={estimator}", *SMALL, *overrides))


def test_one_failing_cell_does_not_lose_the_others(small, monkeypatch):
    places = [small("pela"), small("svd_llm"), small("facts", "estimator.shrinkage_row=3")]
    real = experiments.columns.run_cell

    def failing(cell: Cell, wait: bool):
        if type(cell.method.needed_estimator).__name__ == "PELA":
            raise RuntimeError("no luck")
        return real(cell, wait)

    monkeypatch.setattr(experiments.columns, "run_cell", failing)
    share_data_pass(places)
    run_cells(places)
    assert [p.status for p in places] == ["failed", "done", "failed"]
    record = places[1].record
    assert unpacked(record.outcomes["top1"]).mean() * 100 == pytest.approx(record.metrics["top1"])
    assert len(unpacked(record.outcomes["top1"])) == 3000


def test_cells_that_failed_are_counted_at_the_end(tmp_path):
    command = [sys.executable, "-m", "experiments.reproduce", "experiment=sensitivity_interpolation", "tracking=off"]
    failing = ["model.mini.weights=nowhere.safetensors", "force=true", f"results={tmp_path}"]
    done = subprocess.run([*command, *failing], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "1 of 1 cells failed; their records say why. Run again to retry them." in done.stderr


@pytest.fixture
def passes(monkeypatch) -> list[list[str]]:
    """The layers of each data pass that was run."""
    passes = []
    real = MomentPass.run

    def counted(self, calibration):
        passes.append(list(self.layers))
        return real(self, calibration)

    monkeypatch.setattr("facts.moments.collect.MomentPass.run", counted)
    return passes


def test_a_column_needs_one_data_pass_for_all_its_estimators(small, passes):
    places = [small(name) for name in ("facts", "kfac_expand", "gfwsvd", "asvd")]
    share_data_pass(places)
    assert len(passes) == 1
    assert all(place.status == "missing" for place in places)
    run_cells(places)
    assert [place.status for place in places] == ["done"] * 4
    assert len(passes) == 1


def test_cells_that_are_done_need_no_data_pass(small, passes):
    run_cells([small("svd_llm")])
    share_data_pass([small("svd_llm")])
    assert len(passes) == 1
    share_data_pass([small("svd_llm"), small("facts")])
    assert len(passes) == 2


def test_a_column_shares_a_data_pass_for_every_group_of_layers(small, passes):
    places = [small(name, "hardware.memory.layers_at_once=3") for name in ("facts", "gfwsvd", "pela")]
    share_data_pass(places)
    run_cells(places)
    assert len(passes) > 1 and max(map(len, passes)) == 3
    assert [name for group in passes for name in group] == list(places[0].record.plan)


def test_cells_that_keep_no_cache_share_no_pass_and_are_cells_of_their_own(small):
    shared, alone = (small("facts", f"cache={cache}") for cache in ("true", "false"))
    cell = open_cell(alone.config)
    assert open_cell(shared.config).fingerprint != cell.fingerprint
    share_data_pass([alone])
    run_cells([alone])
    assert not (cell.folder / "cache").exists()
    record = alone.record
    work = ("reading", "calibration", "decomposition", "search")
    assert record.values["total_minutes"] * 60 == pytest.approx(sum(record.seconds[stage] for stage in work))


def test_places_share_a_column_where_network_and_data_are_the_same(cell_config):
    data = [
        place(cell_config(*overrides)).data
        for overrides in (["ratio=0.4"], ["estimator=pela", "search=cors"], ["task.mini.num_calibration=64"])
    ]
    assert data[0] == data[1] != data[2]
    full_scale = [place(cell_config("profile=paper", f"seed={seed}")).data for seed in (0, 0, 1)]
    assert full_scale[0] == full_scale[1] != full_scale[2]


def test_a_cell_that_the_paper_leaves_out_is_shown_as_such(tmp_path, monkeypatch):
    profile = OmegaConf.create({"profile": {"name": "mini"}})
    monkeypatch.setattr("experiments.grid.compose", lambda *overrides: profile)
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
    record = experiments.columns.run_cell(open_cell(cell_config(*SMALL, "search=cors", "ratio=0.6")))
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
