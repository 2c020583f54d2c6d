import pytest

from facts.pruning import block_times


@pytest.fixture(autouse=True)
def hasty_stopwatch(monkeypatch):
    monkeypatch.setattr(block_times, "MIN_SECONDS", 1e-4)
