"""An interruption of finetuning leaves no trace."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import facts
from experiments.config import CONF
from facts.finetuning import finetune
from facts.finetuning.training import State
from tests.finetuning.setting import RUNS, SIZES, Given, Reads, finetuned, interrupt, make_student, recipe
from tests.networks import make_model, same_weights

pytestmark = pytest.mark.attack

ROOT = Path(CONF).parent


@pytest.mark.parametrize(("precision", "at"), [("float32", 1), ("float32", 6), ("float32", 10), ("float16", 6)])
def test_a_run_goes_on_as_if_it_had_not_been_interrupted(tmp_path, precision, at):
    fields = {**RUNS, "precision": precision, "dtype": torch.float32}
    expected, outcome = finetuned(Given(SIZES, torch.float32), **fields)
    with pytest.raises(KeyboardInterrupt):
        finetuned(Given(SIZES, torch.float32, Reads(at, interrupt)), tmp_path, **fields)
    reads = Reads()
    student, again = finetuned(Given(SIZES, torch.float32, reads), tmp_path, **fields)
    # Steps end with batches 2, 4, 5, 7, 9, 10; checkpoints are written after the second, third, fourth and sixth.
    assert reads.count == 10 - max(number for number in (0, 4, 5, 7) if number < at)
    assert same_weights(student, expected) and again.losses == outcome.losses
    finetuned(Given(SIZES, torch.float32, interrupt), tmp_path, **fields)  # it was through: nothing is read


def test_a_checkpoint_holds_the_scale_of_the_loss():
    """Which the other tests leave as it starts: it changes when gradients overflow, or after 2,000 steps."""
    state, again = (State(make_student(torch.float32), recipe(precision="float16"), 1) for _ in range(2))
    changed = state.scaler.state_dict() | {"scale": 512.0, "_growth_tracker": 7}
    state.scaler.load_state_dict(changed)
    again.restore(state.tensors())
    assert again.scaler.state_dict() == changed


@pytest.mark.system
def test_a_killed_process_leaves_no_trace(tmp_path):
    command = "finetuned(Given(SIZES, before_batch=Reads(8, kill)), sys.argv[1], **RUNS)"
    job = subprocess.run(
        [sys.executable, "-c", f"import sys; from tests.finetuning.setting import *; {command}", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert job.returncode == -signal.SIGKILL, job.stderr
    assert len(list(tmp_path.iterdir())) == 1
    reads = Reads()
    student, _ = finetuned(Given(SIZES, before_batch=reads), tmp_path, **RUNS)
    assert reads.count == 3
    assert same_weights(student, finetuned(Given(SIZES), **RUNS)[0])


@pytest.mark.parametrize("change", ["recipe", "student", "teacher", "data"])
def test_what_is_not_the_same_starts_anew(tmp_path, change):
    """And leaves the other's checkpoint alone."""
    finetuned(Given(SIZES), tmp_path, **RUNS)
    student, teacher, task, fields = make_student(), make_model(), Given(SIZES), RUNS
    match change:
        case "recipe":
            fields = {**RUNS, "alpha": 0.25}
        case "student":
            student = facts.compress(make_model(seed=1), estimator="pela", ratio=0.5).model
        case "teacher":
            teacher = make_model(seed=2)
        case "data":
            task = Given(SIZES[::-1])
    reads = task.before_batch = Reads()
    finetune(student, teacher, task, recipe(**fields), tmp_path)
    assert reads.count == 10 and len(list(tmp_path.glob("finetuning-*"))) == 2
