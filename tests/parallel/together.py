"""Work of the processes of a job in test_parallel.py: `torchrun --module tests.parallel.together TASK FOLDER`."""

import math
import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import facts
from facts.estimators import ESTIMATORS, FACTS, GFWSVD
from facts.estimators.base import see_data
from facts.finetuning import Finetuning, finetune
from facts.moments import collect_moments
from facts.moments.collect import DEFAULT_POLICY, MemoryPolicy
from facts.moments.losses import SampledLabels, summed_cross_entropy
from facts.parts.layers import select_layers
from facts.search import CoRSFisher
from facts.utils import distributed
from facts.utils.cache import Cache
from tests.finetuning.setting import Given, make_student
from tests.networks import image_batches, make_model, numbered

# Groups that end within batches, and batches that do not divide evenly among two processes.
SIZES = [3, 3, 1, 2, 3]
SAMPLED = SampledLabels(summed_cross_entropy)
ACCUMULATE = (1, 3)
SEVERAL = {
    **{name: estimator() for name, estimator in ESTIMATORS.items()},
    "gfwsvd in groups": GFWSVD(group_size=2),
    "facts, three iterations": FACTS(num_iterations=3),
}


class Uneven(MemoryPolicy):
    """One process has room for few moments, the others for all."""

    def room_for_moments(self, device):
        return math.inf if distributed.rank() else 8 * 12**2


def factors_of_all(folder: Path | None, memory=DEFAULT_POLICY) -> dict:
    """The factors by estimator and layer."""
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
    """Weights and course of a network that its original taught."""
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
            factors_of_all(folder / "cache"),
            factors_of_all(folder / "cache"),
            factors_of_all(None, MemoryPolicy(moments="host")),
            factors_of_all(None, Uneven()),
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
