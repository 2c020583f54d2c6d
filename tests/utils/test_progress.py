"""Progress: lines of the log, seconds and reports of stages; output that fails; the processors there are."""

import itertools
import os
import subprocess
import sys
import time
from time import sleep

import pytest

from facts.utils import distributed, progress
from facts.utils.progress import READING, progress_of, reporting_to, stage, stopwatch, timed, waiting

PROGRAM = """
import sys
from facts.utils.streams import make_output_lasting
make_output_lasting()
for _ in range(3000):
    print("81 % ± 2, été", flush=True)
print("done", file=sys.stderr)
open(sys.argv[1], "w").write("saved")
"""
OUTPUTS = {"ASCII": "", "a closed pipe": "| head -c 1", "none": ">&- 2>&-", "a full disk": "> /dev/full 2>&1"}


def test_what_takes_long_writes_a_line_now_and_then_where_there_is_no_terminal(capsys, caplog, monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    caplog.set_level("INFO")
    monkeypatch.setattr(progress, "SECONDS", 0.05)

    def lines() -> set[str]:
        caplog.clear()
        sleep(0.2)
        return {*caplog.messages}

    with stopwatch(), stage("search"):
        assert lines() == {"search: 0:00:00 so far"}
        for number in progress.with_progress(range(8), "counting"):  # the innermost alone
            if number in (0, 6):
                assert lines() == {f"counting: {number} of 8, 0:00:00 so far"}  # never that no time is left
        for _ in progress.with_progress(["OpenVINO"], "loading", str):
            assert lines() == {"loading: 0 of 1, OpenVINO, 0:00:00 so far"}
        with progress_of("work") as show, progress.silence():
            show(3, None, "loss 2")
            assert lines() == {"work: 3, loss 2, 0:00:00 so far"}
        caplog.clear()
        for _ in range(15):
            with progress_of("one of many"):  # each is shorter than the time between lines
                sleep(0.02)
        assert {"one of many: 0:00:00 so far"} <= {*caplog.messages}
    with stopwatch():
        caplog.clear()
        for _ in range(15):
            with stage("short"):
                sleep(0.02)
        assert {"short: 0:00:00 so far"} <= {*caplog.messages}
    assert lines() == set() and capsys.readouterr().err == ""


@pytest.mark.parametrize(("since", "expected"), [(0, "0:01:40 left"), (90, "0:00:10 left"), (150, "0:04:10 so far")])
def test_no_time_left_is_never_told_before_the_end(since, expected):
    now = time.monotonic()
    work = progress._Work("timing", start=now - 100 - since, first=0, shown=now - since, done=5, total=10)
    assert str(work) == f"timing: 5 of 10, {expected}"


@pytest.fixture
def clock(monkeypatch):
    """Each look at it takes a second."""
    monkeypatch.setattr(progress.time, "perf_counter", itertools.count().__next__)


def test_stages_add_up_and_inner_stopwatches_share_them(clock):
    with stopwatch() as seconds:
        with stage("one"):
            pass
        with stopwatch() as inner, stage("one"), stage("within it"):  # a part of it, which does not look at the clock
            pass
        with pytest.raises(ZeroDivisionError), stage("two"):
            _ = 1 / 0
        with stage("two"):
            pass
        assert inner is seconds == {"one": 2, "two": 1}
    with stopwatch() as later:
        assert later == {}


def test_waiting_for_data_is_reading(clock):
    """Three looks for data, of which the last finds none; a second each, and one between each and the next."""
    with stopwatch() as seconds, stage("pass"):
        assert list(waiting("ab")) == ["a", "b"]
    assert seconds == {READING: 3, "pass": 4}
    with stage("nothing is timed"):
        assert list(waiting("ab")) == ["a", "b"]


def test_a_stage_is_reported_when_it_ends_and_only_within_the_block():
    heard, seconds = [], {"search": 100.0}
    with reporting_to(lambda stage, values: heard.append((stage, values))):
        with timed(seconds, "search"):
            assert heard == []
        assert heard.pop() == ("search", {"seconds": pytest.approx(seconds["search"] - 100.0)})
        progress.report("finetuning", epoch=1, loss=0.5)
        with pytest.raises(ZeroDivisionError), timed(seconds, "broken"):
            _ = 1 / 0
    with timed(seconds, "evaluation"):
        pass
    assert heard == [("finetuning", {"epoch": 1, "loss": 0.5})]


@pytest.mark.parametrize("where", OUTPUTS)
def test_work_goes_on_whatever_becomes_of_its_output(where, tmp_path):
    command = [sys.executable, "-c", PROGRAM, tmp_path / "file"]
    words = ["bash", "-o", "pipefail", "-c", f'"$@" {OUTPUTS[where]}', "bash", *command]
    done = subprocess.run(words, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == "saved"
    if where == "ASCII":
        assert done.stdout.startswith("81 % ? 2, ?t?\n") and done.stderr == "done\n"


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
