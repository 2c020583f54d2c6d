"""Finetuning by distillation: its loss, its steps, and that an interruption leaves no trace."""

import copy
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from pydantic import ValidationError
from torch import nn

import facts
from experiments.config import CONF
from experiments.train_mini import mini_recipe
from facts.cache import content_key
from facts.finetuning import Finetuning, finetune
from facts.losses import squared_error, summed_cross_entropy
from facts.lowrank import LowRankLinear
from facts.tasks import Digits
from facts.tasks.classification import Classification
from tests.networks import image_batches, make_model, relative_error

FAST = {"learning_rate": 1e-2, "weight_decay": 0.05}


class Given(Classification):
    """Images that are given, in other batches each epoch, and the number of those that were handed out."""

    num_evaluation = 0

    def __init__(self, sizes, dies_at=None):
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "dies_at", dies_at)

    def training(self, model, epoch, seed=0):
        return Dying(image_batches(self.sizes, seed=10 * seed + epoch), self.dies_at)

    def content_key(self, model):
        return content_key(self.sizes)

    inspect = calibration = sensitivity = analysis = None


Given.__abstractmethods__ = frozenset()


@dataclass
class Dying:
    """Batches that call `dies_at(how many were handed out)` before each one."""

    batches: list
    dies_at: object = None

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, part):
        return Dying(self.batches[part], self.dies_at)

    def __iter__(self):
        for batch in self.batches:
            if self.dies_at:
                self.dies_at()
            yield batch
