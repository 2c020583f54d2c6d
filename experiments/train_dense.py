"""Train the dense network of a detector or segmenter from its classifier: `python -m experiments.train_dense`."""

import logging
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig
from safetensors.torch import save_model
from torch import nn

from experiments.cell import Cell
from experiments.compose import command
from experiments.runner import started
from facts.finetuning import Finetuning, finetune
from facts.models import OpenMMLabModel
from facts.models.openmmlab import FeatureNetwork, untrained
from facts.tasks.base import Task
from facts.utils import distributed
from facts.utils.files import at_home, replacing

log = logging.getLogger(__name__)


@command("train_dense")
def main(config: DictConfig) -> None:
    distributed.join()
    with started(under_torchrun=True):
        train(config)


def train(config: DictConfig) -> None:
    """Train the network and write its weights where its recipe looks for them; interrupted training continues."""
    cell = Cell(config)
    cell.check()
    recipe, schedule = cell.recipe, cell.finetuning
    if not (isinstance(recipe, OpenMMLabModel) and recipe.classifier and isinstance(schedule, Finetuning)):
        raise ValueError(f"{config.model.name} is not trained here: choose a detector or segmenter, and its task")
    with suppress(FileNotFoundError):
        raise FileExistsError(f"{recipe.checkpoint()} exists: move it away to train the network again")
    model = from_classifier(recipe, cell.task, schedule, config.hardware.device, cell.folder / "finetuning")
    path = at_home(recipe.weights)
    distributed.on_main_rank(lambda: write_weights(model, path))
    metrics = cell.task.evaluate(model, cell.execution.precision)
    log.info("%s: %s", path, ", ".join(f"{name} {value:.1f}" for name, value in metrics.items()))


def from_classifier(
    recipe: OpenMMLabModel, task: Task, schedule: Finetuning, device: str = "cpu", folder: Path | None = None
) -> FeatureNetwork:
    """Train the recipe's network on its classifier's backbone, with checkpoints in `folder`."""
    assert recipe.classifier is not None
    model = untrained(recipe, recipe.classifier.build(), schedule.seed).to(device)
    finetune(model, model, task, schedule, folder)
    return model


def write_weights(model: nn.Module, path: Path) -> None:
    with replacing(path) as temporary:
        save_model(model, str(temporary))


if __name__ == "__main__":
    main()
