"""Data on the command line: their names, and the metrics measured on them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from facts.modules.networks import is_encoder, reads_tokens
from facts.tasks import ImageFolder
from facts.tasks.classification.base import evaluate_features, num_classes
from facts.tasks.language import Corpus, Split, losses_of_windows

Data = ImageFolder | Corpus


def data_of(
    model: nn.Module, data: str, evaluation_text: str | None = None, sequence_length: int | None = None, **options: Any
) -> Data:
    """Images or a text for a network; an option of None is its default. Refuses a text shorter than a window."""
    if not data:
        raise ValueError("--data is empty: name a folder, a text file or a data set")
    options = {name: value for name, value in options.items() if value is not None}
    if not reads_tokens(model):
        images = ImageFolder(root=Path(data).expanduser(), **options)
        images.inspect()
        return images
    options.pop("num_workers", None)  # windows of tokens are in memory
    if not options.pop("whole", True):
        raise ValueError("--unseen is for images: all of a text is measured, so name one not used to calibrate")
    if sequence_length:
        options["sequence_length"] = sequence_length
    texts = Corpus(training_text=data, evaluation_text=evaluation_text or data, **options)
    texts.inspect()
    splits: dict[str, Split] = {texts.training_text: "training", texts.evaluation_text: "evaluation"}
    for source, split in splits.items():
        if (num_tokens := len(texts.tokens(split, model))) < texts.sequence_length:
            raise ValueError(
                f"{source} has {num_tokens:,} tokens, not one window of {texts.sequence_length:,}: give a longer text, "
                "or a smaller --sequence-length"
            )
    return texts


def task_of(
    model: nn.Module,
    data: str,
    evaluation_text: str | None,
    num_calibration: int | None,
    num_sensitivity: int | None = None,
    **options: Any,
) -> Data:
    """Calibration data: this many images or windows of text; without a number, all of them, up to a bound."""
    options |= {"num_calibration": num_calibration, "num_sensitivity": num_sensitivity}
    task = data_of(model, data, evaluation_text, **options)
    if isinstance(task, ImageFolder):
        return task
    available = len(task.tokens("training", model)) // task.sequence_length
    num_sensitivity = num_sensitivity or max(1, min(task.num_sensitivity, num_calibration or available // 2))
    num_calibration = num_calibration or max(1, min(task.num_calibration, available - num_sensitivity))
    if available < num_sensitivity + num_calibration:
        raise ValueError(
            f"{data} has {available:,} windows of {task.sequence_length:,} tokens, fewer than {num_calibration:,} to "
            f"calibrate on and {num_sensitivity} more for searches: give a longer text, or a smaller --num-calibration "
            "or --sequence-length"
        )
    return replace(task, num_sensitivity=num_sensitivity, num_calibration=num_calibration)


def batches_of(task: Data, model: nn.Module, num_sensitivity: int | None) -> tuple[Any, Any]:
    """Batches to calibrate on, and for searches (None: the same images; texts always have their own windows)."""
    sensitivity = task.sensitivity(model) if num_sensitivity is not None or isinstance(task, Corpus) else None
    return task.calibration(model), sensitivity


def nothing_to_evaluate(task: Data, model: nn.Module) -> str | None:
    """Reason why nothing can be measured after a compression, or None."""
    if isinstance(task, Corpus):
        same = task.evaluation_text == task.training_text
        return "give --evaluation-text, a different text than the one to calibrate on" if same else None
    if not is_encoder(model) and task.labels(model) is None:
        return f"the {len(task.classes)} classes at {task.root} are not the network's {num_classes(model)} classes"
    return None


def measured(task: Data, model: nn.Module, original: nn.Module, precision: torch.dtype) -> dict[str, float]:
    """Measure top-1 accuracy in percent, perplexity, or an encoder's features compared with the original's.

    Returns also standard errors, if there are two samples or more, and the number of samples.
    """
    if isinstance(task, Corpus):
        losses, counts = losses_of_windows(model, task.evaluation(model), precision)
        outcomes = {"perplexity": losses / counts}
    elif is_encoder(model):
        outcomes = evaluate_features(model, original, *task.for_features(model), precision)
    else:
        outcomes = {"top1": 100 * task.evaluate(model, precision).outcomes["top1"].double()}
    found = {}
    for name, samples in outcomes.items():
        value, scale = samples.mean(), 1.0
        if name == "perplexity":
            value = value.exp()  # windows are equally long; d exp(x) = exp(x) dx
            scale = value.item()
        found[name] = value.item()
        if len(samples) > 1:
            found[f"{name}_standard_error"] = scale * samples.std().item() / len(samples) ** 0.5
    return found | {"num_samples": len(samples)}
