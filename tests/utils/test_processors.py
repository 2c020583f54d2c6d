import os

from facts.utils.processors import loader_workers


def test_one_worker_a_processor_unless_told(monkeypatch):
    for count, expected in ((3, 3), (64, 16), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        monkeypatch.setattr(os, "process_cpu_count", lambda count=count: count, raising=False)
        assert loader_workers(None) == expected
    assert loader_workers(0) == 0 and loader_workers(40) == 40
