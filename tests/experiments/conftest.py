"""An environment that lacks a module."""

import importlib.util

import pytest

from experiments.extras import MODULES


@pytest.fixture
def without_module(monkeypatch):
    """A function that hides one module of an extra; those of all extras are there otherwise."""
    real, optional = importlib.util.find_spec, {module for modules in MODULES.values() for module in modules}

    def hide(hidden: str) -> None:
        def find_spec(name, package=None):
            return name != hidden or None if name in optional else real(name, package)

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)

    return hide
