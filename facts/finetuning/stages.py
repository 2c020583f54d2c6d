"""PELA's protocol for detectors and segmenters: first a compressed and retrained backbone, then the whole network."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from facts.compression import Plan, compress, timed
from facts.finetuning.recipe import Finetuning
from facts.finetuning.training import finetune
from facts.models.transplant import untrained
from facts.tasks import Task


@dataclass(frozen=True)
class Stages:
    """The task that the backbone was trained for first, how it is retrained for it, and the training of the whole."""

    task: Task
    retraining: Finetuning
    training: Finetuning

    def identity(self) -> dict[str, Any]:
        return {
            "task": repr(self.task),
            "retraining": self.retraining.identity(),
            "training": self.training.identity(),
        }


def train_in_stages(
    network: nn.Module, task: Task, stages: Stages, compression: Mapping[str, Any], folder: Path | None = None
) -> tuple[nn.Module, Plan, dict[str, float]]:
    """A network like `network`, trained anew on a backbone that was compressed before (paper, supplement, PELA).

    Its classifier is compressed as `compression` says, in `compress`'s words, and retrained with the dense one as
    teacher; then its backbone, under heads that were never trained, learns the task. Returns the network, the ranks by
    the classifier's layers, and the seconds of each stage. Checkpoints are kept in `folder`.
    """
    seconds: dict[str, float] = {}
    device = next(network.parameters()).device
    classifier = network.recipe.classifier.build().to(device)
    result = compress(classifier, stages.task.calibration(classifier), **compression)
    with timed(seconds, "retraining"):
        finetune(result.model, classifier, stages.task, stages.retraining, folder)
    trained = untrained(network.recipe, result.model, stages.training.seed).to(device)
    with timed(seconds, "finetuning"):
        finetune(trained, network, task, stages.training, folder)
    return trained, result.plan, result.summary.seconds | seconds
