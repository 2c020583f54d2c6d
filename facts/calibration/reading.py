"""How a network's outputs are read if no loss is given: as class logits, or as features."""

from collections.abc import Collection, Iterable
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn

from facts.calibration.checks import outputs_of_first
from facts.calibration.data import Batch
from facts.modules.networks import is_encoder, is_transformers
from facts.moments.losses import OutputError, kl_divergence, squared_error
from facts.utils.batches import first_of

Reading = Literal["classes", "features"] | tuple[str, ...]
"""Class logits; features (all tensors of the outputs); or features (the tensors with these names)."""


def as_reading(outputs: str | Collection[str] | None) -> Reading | None:
    """Convert the reading that a user gives; None stays None."""
    if outputs is None or outputs == "classes" or outputs == "features":
        return outputs  # type: ignore[return-value]
    return (outputs,) if isinstance(outputs, str) else tuple(outputs)


def reading_of(model: nn.Module, inputs: Any, precision: torch.dtype) -> Reading:
    """Decide: class logits if `num_classes` is positive, or, without it, if transformers or a linear layer makes them.

    Logits are a tensor `[N, C]` or `[N, T, C]` with more than one class. All other outputs are features.
    """
    num_classes = getattr(model, "num_classes", None)
    if isinstance(num_classes, int):
        return "classes" if num_classes > 0 else "features"
    made: list[Tensor] = []
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                hook = module.register_forward_hook(lambda module, inputs, output: made.append(output))
                stack.callback(hook.remove)
        outputs = outputs_of_first(model, inputs, precision)
    by_classifier = is_transformers(model) or any(outputs is each for each in made)
    are_logits = isinstance(outputs, Tensor) and outputs.ndim in (2, 3) and outputs.shape[-1] > 1 and by_classifier
    return "classes" if are_logits else "features"


def default_error(model: nn.Module, batches: Iterable[Batch]) -> OutputError:
    """Choose the distance between outputs as `facts.prepare` does without a loss, from the first of some batches."""
    inputs, targets = first_of(batches) or (None, None)
    are_labelled = targets is not None and not is_encoder(model)  # labels say nothing about features
    precision = next(model.parameters()).dtype
    return kl_divergence if are_labelled or reading_of(model, inputs, precision) == "classes" else squared_error
