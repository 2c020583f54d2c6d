import gc
import os
from pathlib import Path
from time import perf_counter

import pytest
import torch
from hydra import compose, initialize_config_dir
from hypothesis import settings
from omegaconf import DictConfig

from experiments.config import CONF
from tests.attacks.where import is_attack
from tests.needs import needs_of
from tests.networks import image_batches, make_model

settings.register_profile("suite", deadline=None, max_examples=20, derandomize=True)
settings.load_profile("suite")


def pytest_addoption(parser):
    parser.addoption("--write-results", action="store_true", help="tests/photos write results/photos anew")
    parser.addoption("--max-seconds", type=float, help="fail a test without a marker that takes longer; `make check`")


def pytest_itemcollected(item):
    for marker in needs_of(item.nodeid):
        item.add_marker(marker)
    if is_attack(item.nodeid):
        item.add_marker("attack")


def pytest_terminal_summary(terminalreporter):
    """How many attacks were tried. A test that tries several says so by `record_property("attacks", number)`."""
    counts = {
        outcome: sum(
            dict(report.user_properties).get("attacks", 1)
            for report in terminalreporter.stats.get(outcome, [])
            if "attack" in getattr(report, "keywords", ()) and (report.when == "call" or outcome == "error")
        )
        for outcome in ("passed", "failed", "error")
    }
    if any(counts.values()):
        fallen = counts["failed"] + counts["error"]
        terminalreporter.write_line(f"attacks: {counts['passed']} held, {fallen} fallen")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """What may take minutes comes first, so that of several workers none is left alone with it at the end."""
    items.sort(key=lambda item: not needs_of(item.nodeid))


def seconds_taken():
    """Of the clock, and of processors, by this process and by those that it waited for."""
    return perf_counter(), sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """With `--max-seconds`, fail a test without a marker that takes longer.

    The clock runs on while others use the processor, and processor time adds up over threads: the lesser of the two
    counts.
    """
    before = seconds_taken()
    result = yield
    seconds = min(now - then for now, then in zip(seconds_taken(), before, strict=True))
    allowed = item.config.getoption("--max-seconds")
    if allowed and seconds > allowed and not needs_of(item.nodeid):
        pytest.fail(f"{seconds:.1f} s are too many for a test that is not named in tests/needs.py", pytrace=False)
    return result


def pytest_collection_finish():
    """What was imported stays: garbage collections, half a second each otherwise, need not look through it again."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """So does what the tests of a file leave behind: modules and caches of libraries."""
    if nextitem and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture
def model():
    return make_model()


@pytest.fixture
def batches():
    """Seven samples in batches of 3, 3 and 1."""
    return image_batches([3, 3, 1])


@pytest.fixture(autouse=True)
def one_seed():
    torch.manual_seed(0)


@pytest.fixture
def cell_config(tmp_path: Path):
    """Composes a configuration of `run` from overrides, on little data, with its results in the test's folder."""

    def build(*overrides: str) -> DictConfig:
        with initialize_config_dir(CONF, version_base="1.3"):
            own = [f"results={tmp_path / 'results'}", "tracking=off", "task.mini.num_calibration=128"]
            return compose("config", overrides=[*own, *overrides])

    return build


@pytest.fixture
def no_comparison(monkeypatch):
    """Without the last passes of a compression, which compare and time its outputs whatever the cache holds."""
    for measurement in ("with_distance", "with_latency"):
        monkeypatch.setattr(f"facts.compression.compress.{measurement}", lambda result, *_: result)
