import os

import pytest

from facts.utils.processors import loader_workers


@pytest.mark.parametrize(("able", "processes", "expected"), [(3, 1, 3), (64, 1, 16), (8, 2, 4), (2, 4, 1)])
def test_a_loader_takes_its_share_of_the_processors_or_what_is_asked(monkeypatch, able, processes, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(able)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert loader_workers(None) == expected
    assert loader_workers(0) == 0 and loader_workers(40) == 40
