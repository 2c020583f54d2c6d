"""Two processes that torchrun starts, against one.

They run this file: `torchrun --module tests.parallel.test_parallel TASK FOLDER`.
"""

import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import facts
from experiments.compose import CONF
from facts.estimators import FACTS, GFWSVD
from facts.estimators.base import see_data
from facts.finetuning import Finetuning, finetune
from facts.moments import collect_moments
from facts.moments.collect import DEFAULT_POLICY, MemoryPolicy
from facts.moments.losses import SampledLabels, summed_cross_entropy
from facts.parts.layers import select_layers
from facts.search import CoRSFisher
from facts.utils import distributed
from facts.utils.cache import Cache
from tests.by_sample import EVERY, assert_same_factors
from tests.finetuning.setting import Given, make_student
from tests.networks import image_batches, make_model, numbered, relative_error

pytestmark = pytest.mark.system

# Groups that end within batches, and batches that do not divide evenly among two processes.
SIZES = [3, 3, 1, 2, 3]
ROOT = Path(CONF).parent
EXACT = 1e-12  # float64 sums in another order
SAMPLED = SampledLabels(summed_cross_entropy)
ACCUMULATE = (1, 3)
SEVERAL = {
    **EVERY,
    "gfwsvd in groups": GFWSVD(group_size=2),
    "facts, three iterations": FACTS(num_iterations=3),
}


class Uneven(MemoryPolicy):
    """One process has room for few moments, the others for all."""

    def room_for_moments(self, device):
        return math.inf if distributed.rank() else 8 * 12**2


def factors_of_all(folder: Path | None, memory=DEFAULT_POLICY) -> dict:
    model = make_model()
    settings = {"loss": SAMPLED, "memory": memory, "cache": Cache(folder) if folder else None}
    collect = partial(collect_moments, model, select_layers(model).layers, image_batches(SIZES), **settings)
    factors = {}
    for name, estimator in SEVERAL.items():
        last, moments = see_data(estimator, collect)
        factors |= {(name, layer): last.factors(values) for layer, values in moments.items()}
    return factors


def plans(folder: Path) -> list[dict]:
    """Plans of rank searches that measure and that differentiate; the second time from the cache."""
    options, searches = {"ratio": 0.6, "execution": facts.Execution(cache=folder)}, ("cors", "asvd", CoRSFisher())
    again = (*searches, "cors", CoRSFisher())
    return [facts.compress(make_model(), image_batches(SIZES), search=each, **options).plan for each in again]


def finetuned(folder: Path, accumulate: int) -> list[dict]:
    """Weights after steps of which a process may have no batch, with dropout; and those of the checkpoint."""
    weights, recipe = [], Finetuning(learning_rate=1e-3, num_epochs=2, accumulate=accumulate)
    for _ in range(2):
        student = make_student()
        finetune(student, make_model(), Given(SIZES), recipe, folder)
        weights.append(student.state_dict())
    return weights


def recovered(accumulate: int) -> dict:
    result = facts.compress(make_model(), estimator="pela", ratio=0.6, form="plain")  # pivots may differ by rounding
    options = {"epochs": 2, "learning_rate": 1e-3, "batch_size": 2, "accumulate": accumulate}
    again = facts.recover(result, image_batches([4] * 6), **options)
    return {**again.model.state_dict(), "after": torch.tensor(again.summary.recovery.after)}


def failure() -> str:
    """The error that a process hears of: NaN in the batch of the second one alone."""
    batches = image_batches([2, 2, 2])
    batches[1][0][0] = torch.nan
    model = make_model()
    with pytest.raises(ValueError) as error:
        collect_moments(model, select_layers(model).layers, batches, FACTS().moments)
    return str(error.value)


def unlike_failures() -> str:
    """The error that a process raises where one lacks memory and the other has bad data."""

    def fail():
        raise torch.OutOfMemoryError("none left") if distributed.rank() == 0 else ValueError("bad data")

    with pytest.raises(torch.OutOfMemoryError) as error:
        distributed.on_all_ranks(fail)
    return str(error.value)


def results(folder: Path) -> dict:
    return {
        "failures": distributed.all_gather(failure()),  # first: what follows shows that the processes still meet
        "unlike failures": distributed.all_gather(unlike_failures()),
        "factors": [
            *(factors_of_all(folder / "cache") for _ in range(2)),
            *(factors_of_all(None, memory) for memory in (MemoryPolicy(moments="host"), Uneven())),
        ],
        "plans": plans(folder / "plans"),
        "finetuned": [finetuned(folder / "finetuning", accumulate) for accumulate in ACCUMULATE],
        "recovered": [recovered(accumulate) for accumulate in ACCUMULATE],
    }


def die_during_the_pass(folder: Path) -> None:
    """The second process is killed at its second batch, as by the system where memory runs out; a file says when."""
    seen = []

    def deadly():
        seen.append(1)
        if (distributed.rank(), len(seen)) == (1, 2):
            (folder / "death").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    model = make_model()
    collect_moments(model, select_layers(model).layers, numbered(image_batches(SIZES), deadly), FACTS().moments)


def torchrun(task: str, folder: Path) -> subprocess.CompletedProcess:
    options = ["--standalone", "--nproc-per-node=2", "--module", "tests.parallel.test_parallel"]
    words = [sys.executable, "-m", "torch.distributed.run", *options, task, str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


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
        assert relative_error(ours[name], weights) < EXACT and loaded[name].equal(ours[name])
    for name, weights in recovered(ACCUMULATE[at]).items():
        assert relative_error(together["recovered"][at][name], weights) < EXACT, name


def test_an_error_in_one_process_is_raised_in_all(together):
    """The second process alone saw the batch; where both fail unlike each other, they agree on one error."""
    first, second = together["failures"]
    assert first == second and "NaN or infinity" in first and "batch 1 (from 0)" in first
    assert together["unlike failures"] == ["none left"] * 2


def test_a_process_that_dies_ends_the_job(tmp_path):
    job = torchrun("die", tmp_path)
    assert time.time() - (tmp_path / "death").stat().st_mtime < 60
    assert job.returncode != 0 and "SIGKILL" in job.stderr


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.join()
    task, folder = sys.argv[1], Path(sys.argv[2])
    if task == "die":
        die_during_the_pass(folder)
    else:
        found = results(folder)
        if distributed.rank() == 0:
            torch.save(found, folder / "results.pt")
