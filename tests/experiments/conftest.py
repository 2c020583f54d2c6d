"""An environment that lacks a module, and commands in process."""

import importlib.util
import sys

import pytest

from experiments.config import MODULES


@pytest.fixture
def without_module(monkeypatch):
    """A function that hides one module of an extra; those of all extras are there otherwise."""
    real, optional = importlib.util.find_spec, {module for modules in MODULES.values() for module in modules}

    def hide(hidden: str) -> None:
        def find_spec(name, package=None):
            return name != hidden or None if name in optional else real(name, package)

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)

    return hide


@pytest.fixture
def every_extra(without_module):
    """The packages of all extras seem to be installed."""
    without_module("")


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
