"""The processors that this process may use."""

import pytest

from facts.utils import distributed


@pytest.mark.parametrize(
    ("texts", "expected"),
    [([], 8), (["max 100000"], 8), (["250000 100000"], 3), (["-1", "100000"], 8), (["50000", "100000"], 1)],
)
def test_affinity_and_quota_bound_the_number(tmp_path, monkeypatch, texts, expected):
    files = [tmp_path / str(number) for number in range(len(texts) or 1)]
    for file, text in zip(files, texts, strict=False):
        file.write_text(f"{text}\n")
    monkeypatch.setattr(distributed, "QUOTAS", (files,))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {*range(8)}, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert distributed.num_processors() == distributed.loader_workers(None) == expected
