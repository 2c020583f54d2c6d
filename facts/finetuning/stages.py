"""PELA's protocol for detectors and segmenters: compress and retrain the backbone, then train the whole network."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from facts.finetuning.recipe import Finetuning
from facts.finetuning.training import finetune
from facts.models.openmmlab import untrained
from facts.parts import Plan
from facts.result import CompressionResult
from facts.tasks import Task
from facts.utils.progress import timed


@dataclass(frozen=True)
class Stages:
    """The backbone's first task, its retraining on that task, and the training of the whole network."""

    task: Task
    retraining: Finetuning
    training: Finetuning

    def identity(self) -> dict[str, Any]:
        recipes = {"retraining": self.retraining.identity(), "training": self.training.identity()}
        return {"task": repr(self.task), **recipes}


class Trained(NamedTuple):
    """A network trained on a compressed backbone, the ranks of the classifier's layers, and each stage's seconds."""

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
    """Train a network like `network`, with new heads and a compressed backbone (paper, supplement, PELA).

    `compress(classifier, calibration_data)` compresses the classifier, which is retrained with the dense one as its
    teacher; then its backbone and untrained heads learn the task. Checkpoints are kept in `folder`.
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
