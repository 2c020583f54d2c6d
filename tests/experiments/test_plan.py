"""Before a run: what there is to do, and what stands in the way."""

import os
import subprocess
import sys
from concurrent.futures import BrokenExecutor
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from rich.console import Console

from experiments.cell import results_folder
from experiments.config import CONF
from experiments.grid import GridCell, by_data
from experiments.planning.plan import duration, latest_records, show_cells, state_of
from experiments.preflight import Finding, look_first
from experiments.reproduce import main as reproduce
from experiments.runner import open_cell, run_cell
from facts.models import Recipe

ROOT = Path(CONF).parent


def place(config) -> GridCell:
    return GridCell("demo", "row", "column", config)


@pytest.fixture
def run(monkeypatch, capsys):
    """A function from a command's main function and its overrides to what it prints."""

    def call(main, *overrides):
        monkeypatch.setattr(sys, "argv", ["command", *overrides, "hydra/job_logging=none", "hydra/hydra_logging=none"])
        main()
        return capsys.readouterr().out

    monkeypatch.setenv("COLUMNS", "200")
    return call


@pytest.mark.system
def test_a_plan_tells_every_cell_and_what_is_left_without_running_any(run, tmp_path):
    printed = run(reproduce, "experiment=contributions", f"results={tmp_path}", "tracking=off", "plan=true")
    assert printed.count("to do") == 10
    assert "\n│ contributions" in printed and "together" in printed
    assert not list(tmp_path.rglob("*.json")) and not (tmp_path / "mini/cache").exists()


@pytest.mark.system
def test_several_tables_are_kept_apart(run, tmp_path):
    names = "motivation_layers,fisher_estimators"  # whose fields do not go together
    printed = run(reproduce, f"experiment=[{names}]", f"results={tmp_path}", "tracking=off", "plan=true")
    assert printed.count("to do") == 3 + 14


@pytest.mark.system
def test_the_doctor_names_what_is_missing_and_fails(tmp_path):
    options = ["experiment=sensitivity_interpolation", "profile=paper", f"results={tmp_path}"]
    options += [f"task.paper.root={tmp_path}"]
    command = [sys.executable, "-m", "experiments.doctor", *options]
    wide = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=wide)
    assert done.returncode == 1
    assert "data of classification" in done.stdout and "problem" in done.stdout
    assert "no ImageNet at" in done.stdout


def state(config) -> str:
    """The state of a cell, told without its network and without a change to what is drawn next."""
    drawn = torch.get_rng_state()
    with patch.object(Recipe, "build", lambda recipe: pytest.fail("built")):
        found = state_of(config, latest_records(results_folder(config) / "records"))
    assert torch.equal(torch.get_rng_state(), drawn)
    return found


@pytest.mark.system
def test_states_of_cells(cell_config, monkeypatch, tmp_path):
    config = cell_config("estimator=pela")
    assert state(config) == "to do"
    run_cell(open_cell(config))
    assert state(config) == "done"
    failing = cell_config("estimator=svd_llm")
    monkeypatch.setattr("experiments.runner.measure", lambda cell: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_cell(open_cell(failing))
    assert state(failing) == "failed"
    assert state(cell_config("estimator.shrinkage_row=3")) == "blocked (ValueError)"
    missing = cell_config("profile=paper", f"model.paper.weights={tmp_path / 'none.pth'}")
    assert state(missing) == "blocked (FileNotFoundError)"
    empty = cell_config("profile=paper", "model=mambavision_b", f"checkpoints={tmp_path}")
    assert state(empty) == "blocked (FileNotFoundError)"
    assert state(cell_config("profile=paper", "model=mambavision_b", "model.paper.variant=XL")) == (
        "blocked (ValueError)"
    )


def test_nothing_is_fetched_to_tell_a_state(cell_config, monkeypatch):
    monkeypatch.setattr("facts.models.Recipe.checkpoint", lambda recipe: None)
    for name in ("deit_b", "mambavision_b"):
        assert state(cell_config("profile=paper", f"model={name}")) == "weights not here"


def test_a_run_with_a_problem_is_not_started_unless_asked_for(cell_config, monkeypatch, capsys):
    config = cell_config()
    columns = by_data([place(config)])
    found = [Finding("disk", "problem", "full", "clear it"), Finding("packages", "fine", "all of them")]
    monkeypatch.setattr("experiments.preflight.of_cells", lambda columns: found)
    with pytest.raises(SystemExit, match="force=true"):
        look_first(config, columns, False, Console())
    look_first(config, columns, True, Console())
    printed = capsys.readouterr().out
    assert "clear it" in printed and "all of them" not in printed
    monkeypatch.setattr("experiments.preflight.of_cells", lambda columns: found[1:])
    look_first(config, columns, False, Console())
    assert capsys.readouterr().out == ""


def test_a_run_whose_networks_fail_on_their_device_is_not_started(run, monkeypatch, tmp_path):
    monkeypatch.setattr("experiments.reproduce.first_contact", lambda columns, console: False)
    options = ["experiment=contributions", f"results={tmp_path}", "tracking=off", "deep=true"]
    with pytest.raises(SystemExit, match="nothing was started"):
        run(reproduce, *options)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.system
def test_a_worker_that_dies_ends_the_run_in_one_line(run, monkeypatch, tmp_path):
    monkeypatch.setattr("experiments.reproduce.run_grid", Mock(side_effect=BrokenExecutor("killed")))
    with pytest.raises(SystemExit, match=r"^a worker died, often for lack of memory \(killed\): start again"):
        run(reproduce, "experiment=contributions", f"results={tmp_path}", "tracking=off")


def test_cells_are_shown_by_row_and_column(capsys):
    states = {("A", "Net"): "done", ("B", "Net"): "to do", ("A", "Other"): "n.a.", ("B", "Other"): "failed"}
    show_cells("A table", states, Console(width=80))
    lines = capsys.readouterr().out.splitlines()
    assert any("A " in line and "done" in line and "n.a." in line for line in lines)
    assert any("B " in line and "to do" in line and "failed" in line for line in lines)


@pytest.mark.parametrize(("seconds", "text"), [(5, "5 s"), (600, "10 min"), (7200, "2.0 h")])
def test_durations(seconds, text):
    assert duration(seconds) == text
