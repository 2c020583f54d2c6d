"""Errors of a person's making end a command with one line."""

from types import SimpleNamespace

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from experiments.errors import in_one_line
from experiments.instantiation import instantiate


@pytest.fixture
def mode(monkeypatch):
    def choose(value):
        monkeypatch.setattr(HydraConfig, "get", lambda: SimpleNamespace(mode=value))

    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    choose(RunMode.RUN)
    return choose


def fail():
    with in_one_line():
        raise ValueError("ratio is too large")


def test_one_line(mode):
    with pytest.raises(SystemExit, match=r"^error: ratio is too large \(HYDRA_FULL_ERROR=1 shows where\)$"):
        fail()


def test_in_full(mode, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="ratio is too large"):
        fail()


def test_a_sweep_sees_the_error_itself(mode):
    mode(RunMode.MULTIRUN)
    with pytest.raises(ValueError, match="ratio is too large"):
        fail()


def test_an_object_that_refuses_its_fields_says_so_itself():
    fields = {"_target_": "facts.finetuning.Finetuning", "learning_rate": 1e-5, "min_learning_rate": 1.0}
    with pytest.raises(ValueError, match="it must not lie above it"):
        instantiate(OmegaConf.create(fields))


def test_an_error_of_a_library_is_raised_as_it_is():
    with pytest.raises(ValueError, match=r"^Invalid literal for Fraction: 'x'$"):
        instantiate(OmegaConf.create({"_target_": "fractions.Fraction", "numerator": "x"}))
