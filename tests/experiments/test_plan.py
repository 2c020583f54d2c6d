"""The plan: states of cells; and the doctor: what is missing, and what to do about it."""

import re
from unittest.mock import patch

import pytest
import torch
from rich.console import Console

from experiments.cell import results_folder
from experiments.doctor import Finding, examine, look_first, main
from experiments.grid import GridCell
from experiments.plan import latest_records, show_sweep, state_of
from experiments.reproduce import main as reproduce
from experiments.runner import open_cell, run_cell
from facts.models import Recipe


@pytest.mark.system
def test_a_plan_shows_every_cell_without_running_any(command, tmp_path, caplog):
    """The fields of the two experiments do not go together, and one that all columns set is warned of."""
    printed = command(reproduce, "experiment=[motivation_layers,fisher_estimators]", "model=deit_s", "plan=true")
    assert "model= has no effect on fisher_estimators, all columns of which set it" in caplog.text
    assert printed.count("to do") == 3 + 14
    assert re.search(r"together +│ 17 .* unknown ", printed)
    assert not list(tmp_path.rglob("*.json")) and not (tmp_path / "mini/cache").exists()


def test_a_sweep_shows_lists(composing, capsys, tmp_path):
    with composing():
        show_sweep(["excluded_names=[head],[norm]", f"results={tmp_path}"], Console(width=80))
    assert "excluded_names=[head] " in capsys.readouterr().out


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
    for other in ("model.mini.arguments.num_classes=3", "task.mini.num_calibration=64"):
        assert state(cell_config("estimator=svd_llm", other)) == "to do"
    assert state(cell_config("estimator.shrinkage_row=3")) == "blocked"
    missing = cell_config("profile=paper", f"model.paper.weights={tmp_path / 'none.pth'}")
    assert state(missing) == "blocked"
    monkeypatch.setattr("facts.models.Recipe.checkpoint", lambda recipe: None)
    assert state(cell_config("profile=paper", "model=mambavision_b")) == "weights not here"


def found(*configs) -> dict[str, Finding]:
    """Findings of the first configuration's machine and of all cells, by subject."""
    grid = [GridCell("demo", "row", "column", config) for config in configs]
    return {finding.what: finding for finding in examine(configs[0], grid)}


def test_the_embedded_default_is_fine(cell_config):
    findings = found(cell_config(), cell_config("estimator=none"), cell_config("model=swin_b"))
    assert {finding.level for finding in findings.values()} == {"fine"}
    whats = ["data of classification", "weights of deit_b", "weights of swin_b"]
    assert list(findings) == ["packages", "device", "tracking", "disk", *whats]
    assert "3,000 test images" in findings["data of classification"].detail
    assert "mini_deit.safetensors, sha256 " in findings["weights of deit_b"].detail


def test_the_command_names_what_is_missing_and_fails(command, tmp_path, capsys):
    options = ["experiment=sensitivity_interpolation", "profile=paper", f"imagenet={tmp_path}"]
    with pytest.raises(SystemExit, match="1"):
        command(main, *options)
    assert "problem  data of classification: no ImageNet at" in capsys.readouterr().out


def test_packages_that_a_cell_needs(cell_config, without_module):
    without_module("hyppo")
    overrides = ["analysis=token_coupling"], ["pruning=isomorphic", "estimator=none"], ["ratio=2"]
    findings = found(*(cell_config(*each) for each in overrides))
    levels = {name: findings[f"packages of the extra {name}"].level for name in ("analysis", "pruning")}
    assert findings["demo, row, column"].detail.startswith("ratio is the fraction that remains")
    assert levels == {"analysis": "problem", "pruning": "fine"}
    assert findings["packages of the extra analysis"][2:] == ("hyppo missing", "pip install -e '.[analysis]'")


def test_a_machine_without_gpu_disk_and_account(cell_config, monkeypatch):
    monkeypatch.setattr(type(pytest.importorskip("wandb").api), "api_key", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    findings = found(cell_config("hardware=cuda", "tracking=online", "results=/dev/null"))
    for what, advice in {"device": "hardware=cpu", "disk": "results", "tracking": "wandb login"}.items():
        assert findings[what].level == "problem" and advice in findings[what].advice
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    assert found(cell_config("hardware=cuda"))["device"].detail == "GPU"


def test_weights_and_data_that_are_missing(cell_config, tmp_path, monkeypatch):
    paper = ["profile=paper", f"imagenet={tmp_path}"]
    findings = found(
        cell_config("model.mini.weights=random"),  # of a network whose weights another row lacks
        cell_config(*paper, f"model.paper.weights={tmp_path / 'none.pth'}"),
        cell_config(*paper, "model=mambavision_b", f"checkpoints={tmp_path}"),
        cell_config(*paper, "model=swin_b", "model.paper.weights=random"),
    )
    assert findings["data of classification"].level == "problem"
    assert str(tmp_path) in findings["data of classification"].detail
    for name, file in {"deit_b": "none.pth", "mambavision_b": "MambaVision-B-1K.pth.tar"}.items():
        level, detail = findings[f"weights of {name}"][1:3]
        assert level == "problem" and str(tmp_path / file) in detail
    assert "random" in findings["weights of swin_b"].detail


def test_a_run_with_a_problem_starts_only_by_force(cell_config, monkeypatch, capsys):
    config, findings = (
        cell_config(),
        [Finding("disk", "problem", "full", "clear it"), Finding("packages", "fine", "all")],
    )
    monkeypatch.setattr("experiments.doctor.examine", lambda config, grid: findings)
    with pytest.raises(SystemExit, match="force=true"):
        look_first(config, [], Console())
    config.force = True
    look_first(config, [], Console())
    assert capsys.readouterr().out == 2 * "problem  disk: full\n         to do: clear it\n"
