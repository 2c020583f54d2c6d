"""PELA's protocol for detectors and segmenters: first a compressed and retrained backbone, then the whole network."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from facts.compression.result import CompressionResult
from facts.finetuning.recipe import Finetuning
from facts.finetuning.training import finetune
from facts.models.transplant import untrained
from facts.search.base import Plan
from facts.tasks import Task
from facts.utils.progress import timed


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


class Trained(NamedTuple):
    """A network trained on a compressed backbone, the ranks of the classifier's layers, the seconds of each stage."""

    model: nn.Module
    plan: Plan
    seconds: dict[str, float]


def train_in_stages(
    network: nn.Module,
    task: Task,
    stages: Stages,
    compress: Callable[[nn.Module, Iterable[Any]], CompressionResult],
    folder: Path | None = None,
) -> Trained:
    """Train a network like `network` anew on a backbone that was compressed before (paper, supplement, PELA).

    `compress(classifier, calibration_data)` makes the classifier smaller; it is retrained with the dense one as
    teacher; then its backbone, under heads that were never trained, learns the task. Checkpoints are kept in `folder`.
    """
    seconds: dict[str, float] = {}
    device = next(network.parameters()).device
    classifier = network.recipe.classifier.build().to(device)
    result = compress(classifier, stages.task.calibration(classifier))
    with timed(seconds, "retraining"):
        finetune(result.model, classifier, stages.task, stages.retraining, folder)
    trained = untrained(network.recipe, result.model, stages.training.seed).to(device)
    with timed(seconds, "finetuning"):
        finetune(trained, network, task, stages.training, folder)
    return Trained(trained, result.plan, result.summary.seconds | seconds)
