"""The plan: states of cells, and what the open ones need."""

import re
from unittest.mock import patch

import pytest
import torch
from omegaconf import OmegaConf

from experiments.cell import results_folder
from experiments.grid import GridCell
from experiments.plan import NETWORK, choices, latest_records, needs_of, seconds_of, state_of
from experiments.reproduce import main as reproduce
from experiments.runner import open_cell, run_cell
from experiments.workers import share_data_pass
from facts.models import Recipe


@pytest.mark.system
def test_a_plan_shows_every_cell_without_running_any(command, tmp_path):
    """The fields of the two experiments do not go together."""
    printed = command(reproduce, "experiment=[motivation_layers,fisher_estimators]", "plan=true")
    assert printed.count("to do") == 3 + 14
    assert re.search(r"together +│ 17 .* unknown ", printed)
    assert not list(tmp_path.rglob("*.json")) and not (tmp_path / "mini/cache").exists()


@pytest.mark.parametrize(("trained", "seconds"), [({}, [7.0]), ({"finetuning": {"name": "pruned"}}, [])])
def test_what_trains_does_not_take_the_time_of_what_does_not(trained, seconds):
    network = {group: {"name": group} for group in NETWORK}
    config = OmegaConf.create({**network, "estimator": {"_target_": "facts.estimators.FACTS"}, **trained})
    assert seconds_of(config, {choices(network, NETWORK): [7.0]}) == seconds


def state(config) -> str:
    """The state of a cell, found without its network and without a change to what is drawn next."""
    drawn = torch.get_rng_state()
    with patch.object(Recipe, "build", lambda recipe: pytest.fail("built")):
        found = state_of(config, latest_records(results_folder(config) / "records"))
    assert torch.equal(torch.get_rng_state(), drawn)
    return found


def test_states_of_cells(cell_config, monkeypatch, tmp_path):
    failing = cell_config("estimator=svd_llm")
    assert state(failing) == "to do"
    monkeypatch.setattr("experiments.runner.measure", lambda cell: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_cell(open_cell(failing))
    assert state(failing) == "failed"
    assert state(cell_config("estimator.shrinkage_row=3")) == "blocked (ValueError)"
    missing = cell_config("profile=paper", f"model.paper.weights={tmp_path / 'none.pth'}")
    assert state(missing) == "blocked (FileNotFoundError)"
    monkeypatch.setattr("facts.models.Recipe.checkpoint", lambda recipe: None)
    assert state(cell_config("profile=paper", "model=mambavision_b")) == "weights not here"


def test_what_cells_need(cell_config):
    """Moments once, decompositions by estimator, and on the device those of so many layers at a time."""

    def needs(*cells):
        return needs_of([[cell_config(*overrides) for overrides in cells]])

    memory, disk = needs(["estimator=facts"])
    assert needs(["estimator=none"])[1] == 0 < disk
    assert needs(["estimator=facts"], ["estimator=facts", "ratio=0.4"]) == (memory, disk)
    assert needs(["estimator=facts"], ["estimator=kfac_expand"])[1] > disk
    assert needs(["estimator=facts", "cache=false"]) == (memory, 0)
    assert needs(["estimator=facts", "hardware.memory.layers_at_once=99"]) == (memory, disk)
    few, same = needs(["estimator=facts", "hardware.memory.layers_at_once=1"])
    assert few < memory and same == disk


@pytest.mark.system
def test_disk_is_what_the_cache_takes(cell_config):
    """Headers of the files aside."""
    names = ("facts", "gfwsvd", "shampoo2", "svd_llm", "pela")
    configs = [cell_config(f"estimator={name}", "task.mini.num_calibration=64") for name in names]
    share_data_pass([GridCell("demo", "row", "column", config) for config in configs])
    cells = [open_cell(config) for config in configs]

    def sizes():
        return {path: path.stat().st_size for path in (cells[0].folder / "cache").rglob("*") if path.is_file()}

    for cell in cells:
        cells[0].calibration.decompositions(cell.method.needed_estimator)
    assert needs_of([configs])[1] == pytest.approx(sum(sizes().values()), rel=0.1)
