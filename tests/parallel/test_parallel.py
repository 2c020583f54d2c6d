"""Two processes that torchrun starts, against one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from experiments.compose import CONF
from tests.by_sample import assert_same_factors
from tests.networks import relative_error
from tests.parallel.together import ACCUMULATE, factors_of_all, finetuned, plans, recovered

pytestmark = pytest.mark.system

ROOT = Path(CONF).parent
EXACT = 1e-12  # float64 sums in another order


def torchrun(task: str, folder: Path) -> subprocess.CompletedProcess:
    options = ["--standalone", "--nproc-per-node=2", "--module", "tests.parallel.together"]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, task, str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    folder = tmp_path_factory.mktemp("together")
    job = torchrun("results", folder)
    assert job.returncode == 0, job.stderr
    return torch.load(folder / "results.pt", weights_only=False)


def test_two_processes_give_the_factors_of_one(together, tmp_path):
    """From the data, from the cache, with moments in main memory and nothing kept, and with uneven room for them."""
    expected = factors_of_all(tmp_path)
    for found in together["factors"]:
        assert_same_factors(found, expected)


def test_two_processes_give_the_plans_of_one(together, tmp_path):
    assert together["plans"] == plans(tmp_path)


@pytest.mark.parametrize("at", range(len(ACCUMULATE)))
def test_two_processes_train_the_weights_of_one(together, tmp_path, at):
    """By finetuning, from whose checkpoint the second run reads them, and by recovery."""
    ours, loaded = together["finetuned"][at]
    expected, _ = finetuned(tmp_path, ACCUMULATE[at])
    for name, weights in expected.items():
        assert relative_error(ours[name], weights) < EXACT
        assert loaded[name].equal(ours[name])
    for name, weights in recovered(ACCUMULATE[at]).items():
        assert relative_error(together["recovered"][at][name], weights) < EXACT, name


def test_an_error_in_one_process_is_raised_in_all(together):
    """The second process alone saw the batch; where both fail unlike each other, they agree on one error."""
    first, second = together["failures"]
    assert first == second
    assert "NaN or infinity" in first and "batch 1 (from 0)" in first
    assert together["unlike failures"] == ["none left"] * 2


def test_a_process_that_dies_ends_the_job(tmp_path):
    job = torchrun("die", tmp_path)
    assert time.time() - (tmp_path / "death").stat().st_mtime < 60
    assert job.returncode != 0
    assert "SIGKILL" in job.stderr
