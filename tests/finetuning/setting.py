"""A task of given images, a student and its teacher, and runs that end early."""

import os
import signal

import torch
from torch import nn

import facts
from facts.finetuning import Finetuning, finetune
from facts.moments.losses import summed_cross_entropy
from facts.tasks.classification.base import Classification
from facts.utils.cache import content_key
from tests.networks import UNIFORM, image_batches, make_model, numbered

SIZES = [3, 2, 3, 1, 2]  # with two batches a step, three steps an epoch
RUNS = {"num_epochs": 2, "accumulate": 2, "save_every": 2}


class Given:
    """A task of given images, the same in every epoch; `before_batch()` is called before each batch is handed out."""

    loss = staticmethod(summed_cross_entropy)
    output_error = Classification.output_error

    def __init__(self, sizes, dtype=torch.float64, before_batch=lambda: None):
        self.batches, self.before_batch = image_batches(sizes, dtype=dtype), before_batch

    def training(self, model, epoch, seed=0):
        return numbered(self.batches, self.before_batch)

    def content_key(self, model):
        return content_key(self.batches)


class Reads:
    """Counts the batches that are handed out; in place of number `at` it calls `act`."""

    def __init__(self, at=None, act=None):
        self.at, self.act, self.count = at, act, 0

    def __call__(self):
        self.count += 1
        if self.count == self.at:
            self.act()


def interrupt():
    raise KeyboardInterrupt


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def noted(monkeypatch, note):
    """What `note` says of the optimizer before each of its steps."""
    seen, step = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *given: seen.append(note(self)) or step(self, *given))
    return seen


def make_student(dtype=torch.float64):
    """Another network than the teacher `make_model()`, with dropout and low-rank layers."""
    student = facts.compress(make_model(dtype, seed=1), estimator="pela", ratio=0.6, **UNIFORM).model
    student.head = nn.Sequential(nn.Dropout(0.5), student.head)
    return student


def finetuned(task, folder=None, dtype=torch.float64, **fields):
    student = make_student(dtype)
    return student, finetune(student, make_model(dtype), task, recipe(**fields), folder)


def recipe(**fields):
    return Finetuning(**{"learning_rate": 1e-2, **fields})
