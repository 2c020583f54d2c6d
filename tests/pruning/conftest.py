import pytest

from facts.pruning.methods import nvit


@pytest.fixture(autouse=True)
def hasty_stopwatch(monkeypatch):
    monkeypatch.setattr(nvit, "MIN_SECONDS", 1e-4)
