"""Learning rates, step by step, against their formulas."""

import math

import pytest
import torch
from pydantic import ValidationError

from facts.finetuning import Finetuning

STEPS, EPOCH = 60, 5


def rates(**fields) -> list[float]:
    """The rate of every step, for a training of 12 epochs."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = Finetuning(learning_rate=0.1, **fields).scheduler(optimizer, STEPS, EPOCH, initialize=True)
    found = []
    for step in range(STEPS):
        schedule.step_update(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_a_cosine():
    expected = [0.02 + 0.04 * (1 + math.cos(math.pi * step / STEPS)) for step in range(STEPS)]
    assert rates(min_learning_rate=0.02) == pytest.approx(expected)


def test_a_line():
    assert rates(schedule="linear") == pytest.approx([0.1 * (1 - step / STEPS) for step in range(STEPS)])


def test_the_1x_schedule_of_detectors():
    expected = [0.1] * 8 * EPOCH + [0.01] * 3 * EPOCH + [0.001] * EPOCH
    assert rates(schedule="steps", decay_epochs=[8, 11]) == pytest.approx(expected)


@pytest.mark.parametrize("fields", [{"schedule": "linear"}, {"schedule": "steps", "decay_epochs": [8]}, {}])
def test_all_rise_at_first_and_then_are_what_they_were(fields):
    risen, plain = rates(num_warmups=6, **fields), rates(**fields)
    assert risen[:6] == pytest.approx([0.1 * step / 6 for step in range(6)])
    assert risen[6:] == plain[6:]
    assert rates(num_warmups=999, **fields)[12:] == plain[12:]  # a fifth at most


@pytest.mark.parametrize("fields", [{"schedule": "steps"}, {"decay_epochs": [8]}])
def test_epochs_of_decay_go_with_steps_alone(fields):
    with pytest.raises(ValidationError, match="give them with schedule=steps"):
        Finetuning(**fields)
