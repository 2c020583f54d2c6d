"""Kinds of outputs, class logits or features, and checks of a network, its data and its outputs."""

import logging
import math
from collections.abc import Collection, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from facts.cost.probe import Probe
from facts.cost.timing import HALF
from facts.modules.networks import is_encoder, is_transformers
from facts.moments.losses import (
    NOTHING,
    Loss,
    OutputError,
    SquaredError,
    kl_divergence,
    loss_of_labels,
    on_given_labels,
    refuse_unfit_labels,
    scales_of,
    squared_error,
    summed_binary_cross_entropy,
    summed_cross_entropy,
    summed_squared_error,
)
from facts.utils.batches import batch_size, described, first_of

log = logging.getLogger(__name__)

OutputKind = Literal["classes", "features"] | tuple[str, ...]
"""Class logits; features (all tensors of the outputs); or features (the tensors with these names)."""


def as_output_kind(outputs: str | Collection[str] | None) -> OutputKind | None:
    """Convert what a user gives; None stays None."""
    if outputs is None or outputs == "classes" or outputs == "features":
        return outputs  # type: ignore[return-value]
    return (outputs,) if isinstance(outputs, str) else tuple(outputs)


def output_kind(model: nn.Module, probe: Probe) -> OutputKind:
    """Decide: class logits if `num_classes` is above one, or, without it, if transformers or a linear layer makes them.

    Logits are a tensor `[N, C]` or `[N, T, C]` with more than one class. All other outputs are features.
    """
    num_classes, outputs = getattr(model, "num_classes", None), probe.outputs
    if isinstance(num_classes, int):
        return "classes" if num_classes > 1 else "features"
    by_classifier = is_transformers(model) or probe.makers
    are_logits = isinstance(outputs, Tensor) and outputs.ndim in (2, 3) and outputs.shape[-1] > 1 and by_classifier
    return "classes" if are_logits else "features"


def default_error(model: nn.Module, batches: Iterable[tuple[Any, Any]]) -> OutputError:
    """Choose the distance between outputs as `facts.prepare` does without a loss, from the first of some batches."""
    inputs, targets = first_of(batches) or (None, None)
    dtype = next(model.parameters()).dtype
    precision = dtype if dtype in HALF else torch.float32
    probe = Probe.of(model, inputs, precision=precision)
    has_labels = targets is not None and not is_encoder(model)  # labels say nothing about features
    kind = "classes" if has_labels else output_kind(model, probe)
    return error_of(kind, loss_of_labels(probe.outputs, targets), model, batches, precision)


def error_of(
    kind: OutputKind | None,
    loss: Loss,
    model: nn.Module,
    batches: Iterable[tuple[Any, Any]] | None,
    precision: torch.dtype,
) -> OutputError:
    """The distance between outputs that suits a loss.

    Of classes it is the KL divergence; of one value with labels the squared error relative to the value's variance over
    the data; of features and for other losses the relative squared error.
    """
    if kind not in (None, "classes"):
        return SquaredError(kind) if isinstance(kind, tuple) else squared_error
    loss = on_given_labels(loss)
    if loss is summed_squared_error:
        (scale,) = scales_of(model, batches or (), (), precision)
        return SquaredError(scale=scale.item())
    return kl_divergence if loss in (summed_cross_entropy, summed_binary_cross_entropy) else squared_error


def refuse_unfit_network(model: nn.Module) -> None:
    """Raises `ValueError` for anything but a network with floating-point weights that can have gradients."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model must be a torch.nn.Module, got a {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(f"{type(model).__name__} is TorchScript: give the network that it was traced or scripted from")
    if torch.is_inference_mode_enabled() or any(parameter.is_inference() for parameter in model.parameters()):
        raise ValueError(
            "nothing made under torch.inference_mode() has gradients: build the network, and call this, outside of it "
            "(torch.no_grad() is fine)"
        )
    if any(parameter.is_mps for parameter in model.parameters()):
        raise ValueError("an Apple GPU (MPS) cannot compute in float64, which decides ranks: use the CPU, model.cpu()")
    for name, parameter in model.named_parameters():
        if is_traceable_wrapper_subclass(parameter.data):  # torchao's, DTensor
            kind = type(parameter.data).__name__
            raise ValueError(
                f"{name} of {type(model).__name__} is a {kind}, no plain tensor: if the network is quantised or "
                "sharded, compress it first, and quantise or shard the result"
            )
    if not any(parameter.is_floating_point() for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no weights in floating point; if it is quantised, compress it first and "
            "quantise the result"
        )


def refuse_unfit_functions(
    model: nn.Module, outputs: Any, targets: Any, loss: Loss | None, output_error: OutputError
) -> None:
    """Try the functions of the outputs on those of the first sample.

    Raises `ValueError` if `output_error` cannot compare them, or if `loss` is a mean over samples.
    """
    with torch.no_grad():
        try:
            float(output_error(outputs, outputs))
        except Exception as error:  # from anybody's code, on any input
            first, *_ = str(error).splitlines() or [repr(error)]
            raise ValueError(
                f"{getattr(output_error, '__name__', 'output_error')} cannot compare the outputs of "
                f"{type(model).__name__}, {described(outputs)} ({first}): give facts.prepare(..., output_error=), a "
                "function of the original's and the changed outputs, summed over samples"
            ) from error
        if loss and isinstance(targets, Tensor) and isinstance(outputs, Tensor) and outputs.shape[:1] == (1,):
            once, twice = (loss(torch.cat([outputs] * n), torch.cat([targets[:1]] * n)).item() for n in (1, 2))
            if math.isfinite(once) and not math.isclose(twice, 2 * once, rel_tol=0.1):
                raise ValueError(
                    f"the loss must be a sum over samples: it is {once:.4g} for one, and {twice:.4g} for the same one "
                    'twice. Give reduction="sum" instead of a mean, or leave loss out if it is cross-entropy'
                )


def refuse_ignored_labels(batches: Iterable[tuple[Any, Any]], outputs: Any) -> None:
    """Raises `ValueError` if cross-entropy ignores all labels of some batches; warns if it does so for most samples.

    Loaders are read until a label counts; only lists are read to the end, and their labels compared with `outputs`.
    """
    counted, num_samples, is_list = 0, 0, isinstance(getattr(batches, "data", None), list)
    for inputs, targets in batches:
        if not isinstance(targets, Tensor) or targets.is_floating_point():
            return
        if len(targets) != batch_size(inputs):
            raise ValueError(f"a batch of {batch_size(inputs)} samples has {len(targets)} labels: give one for each")
        counted += int((targets != NOTHING).reshape(len(targets), -1).any(dim=1).sum())
        num_samples += len(targets)
        if isinstance(outputs, Tensor) and outputs.ndim == 2:
            refuse_unfit_labels(targets, outputs.shape[-1])
        if counted and not is_list:
            return
    if not counted:
        raise ValueError(
            f"none of the {num_samples} samples has a label that counts, all are {NOTHING}, which is "
            "ignored: give labels from 0 on, or inputs alone, for which labels are drawn from the network"
        )
    if counted < num_samples / 2:
        log.warning("only %d of %d samples have a label that counts (not %d)", counted, num_samples, NOTHING)


def refuse_not_finite(original: Any, changed: Any) -> None:
    """Raises `ValueError` for outputs of a changed network that are not finite where the original's are."""
    for expected, found in zip(tree_leaves(original), tree_leaves(changed), strict=True):
        if isinstance(expected, Tensor) and (expected.isfinite() & ~found.isfinite()).any():
            raise ValueError(
                "the compressed network gives NaN or infinity where the original's outputs are finite: try "
                'form="plain", or float32 if the network or precision is half'
            )
