"""The plan, the doctor and the table of a sweep: states of cells, what is missing, and what to do about it."""

import re
from unittest.mock import patch

import pytest
import torch
from rich.console import Console

from experiments.cell import State, recall
from experiments.compose import jobs_of
from experiments.doctor import look_first, main
from experiments.plan import show_sweep, sweep_of
from experiments.reproduce import main as reproduce
from experiments.runner import run_cell
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
        show_sweep(sweep_of(jobs_of(["excluded_names=[head],[norm]", f"results={tmp_path}"])), Console(width=80))
    assert "excluded_names=[head] " in capsys.readouterr().out


def test_states_of_cells(make_cell, monkeypatch, tmp_path):
    """They are found without the network and without a change to what is drawn next."""

    def state(*overrides: str) -> State:
        cell, drawn = make_cell(*overrides), torch.get_rng_state()
        with patch.object(Recipe, "build", lambda recipe: pytest.fail("built")):
            recall([cell], cell.records)
        assert torch.equal(torch.get_rng_state(), drawn)
        return cell.state()

    assert state("estimator=svd_llm") == ("to do", "")
    monkeypatch.setattr("experiments.runner.measure", lambda cell: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_cell(make_cell("estimator=svd_llm"))
    assert state("estimator=svd_llm") == ("failed", "ZeroDivisionError: division by zero")
    for other in ("model.mini.arguments.num_classes=3", "task.mini.num_calibration=64"):
        assert state("estimator=svd_llm", other).name == "to do"
    name, why = state("profile=paper", f"model.paper.weights={tmp_path / 'none.pth'}")
    assert name == "blocked" and why.startswith("no checkpoint") and str(tmp_path / "none.pth") in why
    name, why = state("profile=paper", "model=mambavision_b", f"checkpoints={tmp_path}")
    assert name == "blocked" and str(tmp_path / "MambaVision-B-1K.pth.tar") in why
    assert state("profile=paper", "model=swin_b", "model.paper.weights=random").name == "to do"


def test_the_doctor_names_each_reason_once(make_cell, without_module, monkeypatch, tmp_path, capsys):
    """A run with a problem starts only by force."""
    without_module("hyppo")
    monkeypatch.setattr(type(pytest.importorskip("wandb").api), "api_key", None)
    given = ["tracking=online", "profile=paper", f"imagenet={tmp_path}"]
    random, missing = "model.paper.weights=random", f"checkpoints={tmp_path}"
    cells = [make_cell(*given, each) for each in (missing, random, "ratio=2", "analysis=token_coupling", missing)]
    config = make_cell(*given, "results=/dev/null").config
    with pytest.raises(SystemExit, match="force=true"):
        look_first(config, cells, Console(width=80))
    found = re.findall("problem  (.*)", capsys.readouterr().out)
    told = ["tracking: W&B online without an account", "disk: cannot write to the folder /dev/null", "no checkpoint"]
    told += ["ratio is the fraction that remains", "analysis=token_coupling needs hyppo: pip install -e '.[analysis]'"]
    told += ["data of classification: no ImageNet at"]
    assert len(found) == len(told) and all(part in line for part, line in zip(told, found, strict=True)), found
    config.force = True
    look_first(config, cells, Console(width=80))


def test_the_command_says_what_is_fine_and_fails_for_what_is_missing(command, tmp_path, capsys):
    printed = command(main, "experiment=sensitivity_interpolation")
    assert "problem" not in printed and re.search("fine +data of classification: 3,000 test images", printed)
    assert re.search("fine +cells: 1 to do", printed)
    with pytest.raises(SystemExit, match="1"):
        command(main, "experiment=sensitivity_interpolation", "profile=paper", f"imagenet={tmp_path}")
    assert "problem  data of classification: no ImageNet at" in capsys.readouterr().out
