"""An environment that lacks a module, commands in process, and the configurations and experiments of commands."""

import importlib.util
import sys

import pytest
from hydra import compose
from hydra.core.hydra_config import HydraConfig

from experiments.config import MODULES
from experiments.grid import chosen_experiments

SMALL = ["model.mini.weights=random", "task.mini.num_calibration=64"]  # no weights are read, and few images


@pytest.fixture
def without_module(monkeypatch):
    """A function that hides one module of an extra, or `none`; those of all extras are there otherwise."""
    real, optional = importlib.util.find_spec, {module for modules in MODULES.values() for module in modules}

    def hide(hidden: str) -> None:
        def find_spec(name, package=None):
            return name != hidden or None if name in optional else real(name, package)

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)

    return hide


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """A function from the main function of a command and its overrides to what it prints."""

    def call(main, *overrides: str, results: object = tmp_path) -> str:
        own = [f"results={results}", "tracking=off", "hydra/job_logging=none", "hydra/hydra_logging=none"]
        monkeypatch.setattr(sys, "argv", ["command", *overrides, *own])
        main()
        return capsys.readouterr().out

    monkeypatch.setenv("COLUMNS", "200")
    return call


@pytest.fixture
def configured(composing, monkeypatch):
    """A function from a command and its overrides to the configuration, which Hydra knows as that of this process."""

    def make(name: str, *overrides: str):
        config = compose(name, [*overrides], return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        return config

    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # restored afterwards
    with composing():
        yield make


@pytest.fixture
def chosen(configured):
    """A function that makes the experiments of a command's overrides."""
    return lambda *overrides: list(chosen_experiments(configured("reproduce", *overrides)))
