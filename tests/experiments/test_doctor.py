"""The doctor: what is fine, what is not, and what to do about it."""

import pytest
import torch
import wandb
from rich.console import Console

from experiments.doctor import Finding, examine, look_first, main
from experiments.grid import GridCell


def found(*configs) -> dict[str, Finding]:
    """Findings of the first configuration's machine and of all cells, by subject."""
    grid = [GridCell("demo", "row", "column", config) for config in configs]
    return {finding.what: finding for finding in examine(configs[0], grid)}


def test_the_embedded_default_is_fine(cell_config):
    findings = found(cell_config(), cell_config("estimator=none"), cell_config("model=swin_b"))
    assert {finding.level for finding in findings.values()} == {"fine"}
    whats = ["data of classification", "weights of deit_b", "weights of swin_b", "memory", "disk"]
    assert list(findings) == ["packages", "device", "tracking", *whats]
    assert "3,000 test images" in findings["data of classification"].detail
    assert "mini_deit.safetensors, sha256 " in findings["weights of deit_b"].detail


def test_the_command_names_what_is_missing_and_fails(command, tmp_path, capsys):
    options = ["experiment=sensitivity_interpolation", "profile=paper", f"imagenet={tmp_path}"]
    with pytest.raises(SystemExit, match="1"):
        command(main, *options)
    assert "problem  data of classification: no ImageNet at" in capsys.readouterr().out


def test_packages_that_a_cell_needs(cell_config, without_module):
    without_module("hyppo")
    overrides = ["analysis=token_coupling"], ["pruning=isomorphic"]
    findings = found(*(cell_config(*each) for each in overrides))
    levels = {name: findings[f"packages of the extra {name}"].level for name in ("analysis", "pruning")}
    assert levels == {"analysis": "problem", "pruning": "fine"}
    assert findings["packages of the extra analysis"][2:] == ("hyppo missing", "pip install -e '.[analysis]'")


def test_a_machine_without_gpu_memory_disk_and_account(cell_config, monkeypatch):
    monkeypatch.setattr("experiments.doctor.needs_of", lambda columns: (2 * 10**18, 10**18))
    monkeypatch.setattr(type(wandb.api), "api_key", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    findings = found(cell_config("hardware=cuda", "tracking=online"))
    assert findings["memory"].level == "warning" and "batch_size" in findings["memory"].advice
    for what, advice in {"device": "hardware=cpu", "disk": "results", "tracking": "wandb login"}.items():
        assert findings[what].level == "problem" and advice in findings[what].advice
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (24 * 10**9, 24 * 10**9))
    findings = found(cell_config("hardware=cuda"))
    assert findings["device"].detail == "GPU" and "24.0 GB free" in findings["memory"].detail


def test_weights_and_data_that_are_missing(cell_config, tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.doctor.needs_of", lambda columns: (0, 0))
    paper = ["profile=paper", f"imagenet={tmp_path}"]
    findings = found(
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
