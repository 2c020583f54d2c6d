"""How data are named on the command line, and what is measured on them."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from facts.networks import reads_tokens
from facts.tasks.corpus import Corpus
from facts.tasks.image_folder import ImageFolder
from facts.tasks.language import perplexity

Data = ImageFolder | Corpus


def data_of(
    model: nn.Module,
    data: str,
    evaluation_text: str | None = None,
    num_calibration: int | None = None,
    sequence_length: int | None = None,
    **options: Any,
) -> Data:
    """What a network reads: a folder of images, or a text. Options that are None stay at their defaults.

    Raises `ValueError` or an `OSError` where it is not there.
    """
    options = {name: value for name, value in options.items() if value is not None}
    if num_calibration:
        options["num_calibration"] = num_calibration
    task: Data
    if reads_tokens(model):
        options.pop("num_workers", None)  # windows of tokens lie in memory
        options["num_sensitivity"] = min(Corpus.num_sensitivity, num_calibration or Corpus.num_calibration)
        if sequence_length:
            options["sequence_length"] = sequence_length
        task = Corpus(training_text=data, evaluation_text=evaluation_text or data, **options)
    else:
        task = ImageFolder(root=Path(data).expanduser(), **options)
    task.inspect()
    return task


def nothing_to_evaluate(task: Data, model: nn.Module) -> str | None:
    """Why nothing can be measured after a compression, or None."""
    if isinstance(task, Corpus):
        same = task.evaluation_text == task.training_text
        return "give --evaluation-text, a text that is not the one to calibrate on" if same else None
    if task.labels(model) is None:
        return f"the {len(task.classes)} folders at {task.root} are not the network's {model.num_classes} classes"
    return None


def measured(task: Data, model: nn.Module, precision: torch.dtype) -> dict[str, float]:
    """Top-1 accuracy in percent of the images kept for it, or the perplexity of the text."""
    if isinstance(task, Corpus):
        return {"perplexity": perplexity(model, task.evaluation(model), precision)}
    return task.evaluate(model, precision)
