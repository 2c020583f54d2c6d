"""The doctor's deep look: every precision of a device, against the CPU; what fails is told and ends nothing else."""

import pytest
import torch
from rich.console import Console

import experiments.first_contact
from experiments.first_contact import PRECISIONS, STEPS, first_contact, trials_of
from tests.devices.pretended import pretended_cuda

pytestmark = pytest.mark.system


@pytest.fixture
def config(cell_config):
    return cell_config("model.mini.weights=random")


def test_the_cpu(config):
    trials = {trial.precision: trial for trial in trials_of(config)}
    assert list(trials) == ["float32", "bfloat16"] and all(trial.is_fine for trial in trials.values())
    assert trials["float32"].difference == 0 < trials["bfloat16"].difference < PRECISIONS["bfloat16"][2]
    assert all(set(trial.seconds) == set(STEPS) for trial in trials.values())


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
def test_a_gpu(config):
    """Autocast to bfloat16 needs a real one; here it stays in float32."""
    config.hardware.device = "cuda"
    with pretended_cuda():
        trials = list(trials_of(config))
    assert [trial.precision for trial in trials] == ["float32", "TF32", "bfloat16"]
    assert all(trial.is_fine and trial.difference < 1e-5 for trial in trials), trials
    assert torch.get_float32_matmul_precision() == "highest"


def test_what_is_not_here_is_made_up(cell_config, tmp_path):
    config = cell_config("profile=paper", f"task.paper.root={tmp_path}", "model.paper.weights=missing.safetensors")
    config.model.paper.tag = "test_vit"
    trials = list(trials_of(config))
    assert all(trial.is_fine for trial in trials), trials
    assert "random weights (" in trials[0].notes[0] and "noise for data (no ImageNet at" in trials[0].notes[1]


def test_what_fails_is_told(config, monkeypatch):
    real, calls = experiments.first_contact.attempt, []

    def attempt(model, task, batch, precision, seconds):
        if precision == "bfloat16":
            raise RuntimeError("no kernel for this\nand many more lines")
        outputs = real(model, task, batch, precision, seconds)
        calls.append(precision)
        return outputs * 1.1 if len(calls) > 1 else outputs  # the first is the reference

    monkeypatch.setattr(experiments.first_contact, "attempt", attempt)
    console = Console(record=True, width=200)
    assert not first_contact([[config]], console)
    printed = console.export_text()
    assert "float32: fails" in printed and "1.0e-01" in printed
    assert "bfloat16: fails" in printed and "no kernel for this" in printed and "many more lines" not in printed


def test_a_recovered_network_without_numbers_is_told(config, monkeypatch):
    real = experiments.first_contact.recover

    def recover(*arguments, **options):
        result = real(*arguments, **options)
        with torch.no_grad():
            next(result.model.parameters()).fill_(torch.nan)
        return result

    monkeypatch.setattr(experiments.first_contact, "recover", recover)
    (trial,) = trials_of(config)
    assert "the recovered network's outputs are no numbers" in trial.failure and not trial.is_fine
