"""Checks of a network, its data and the functions of its outputs, before and after the data passes."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from facts.cost.trace import first_sample, has_row_per_sample
from facts.modules.modes import autocast, evaluating, frozen
from facts.modules.networks import run
from facts.moments.losses import Loss, OutputError
from facts.utils.batches import described, to_device


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
    if not any(parameter.is_floating_point() for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no weights in floating point; if it is quantised, compress it first and "
            "quantise the result"
        )


def with_samples(batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the batch itself. Raises `ValueError` if it has no samples."""
    first = next((leaf for leaf in tree_leaves(batch[0]) if isinstance(leaf, Tensor)), None)
    if first is not None and first.shape[:1] == (0,):
        raise ValueError(f"a batch of the data holds no samples ({described(first)}): leave it out")
    return batch


def outputs_of_first(model: nn.Module, inputs: Any, precision: torch.dtype) -> Any:
    """Compute the outputs for the first sample of a batch. Raises `ValueError` if the network cannot read it."""
    device = next(model.parameters()).device
    inputs = to_device(inputs, device)
    with torch.no_grad(), evaluating(model), autocast(device, precision):
        try:
            return run(model, first_sample(inputs) if has_row_per_sample(inputs) else inputs)
        except (IndexError, ValueError) as error:  # networks raise these for other shapes
            raise ValueError(
                f"{type(model).__name__} cannot read the first sample of {described(inputs)} ({error}): a batch has "
                "its samples along the first axis, images as [N, C, H, W]"
            ) from error


def refuse_unfit_functions(
    model: nn.Module, batch: tuple[Any, Any], loss: Loss | None, output_error: OutputError, precision: torch.dtype
) -> None:
    """Run the network on the first sample of a batch.

    Raises `ValueError` if it cannot read the sample, if `output_error` cannot compare its outputs, or if `loss` is a
    mean over samples.
    """
    inputs, targets = to_device(batch, next(model.parameters()).device)
    outputs = outputs_of_first(model, inputs, precision)
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


def not_reached(
    model: nn.Module, layers: Mapping[str, nn.Module], loss: Loss, batch: tuple[Any, Any], precision: torch.dtype
) -> list[str]:
    """Find the layers that do not affect the loss of the first sample, such as a pooler whose output is not used."""
    marks, device = dict[str, Tensor](), next(model.parameters()).device
    inputs, targets = to_device(first_sample(batch), device)
    with ExitStack() as stack, torch.enable_grad(), frozen(model), autocast(device, precision):
        for name, layer in layers.items():
            mark = marks[name] = torch.zeros((), device=device, requires_grad=True)
            hook = layer.register_forward_hook(lambda layer, inputs, output, mark=mark: output + mark.to(output))
            stack.callback(hook.remove)
        value = loss(run(model, inputs), targets)
        grads = torch.autograd.grad(value, list(marks.values()), allow_unused=True)
    return [name for name, grad in zip(marks, grads, strict=True) if grad is None]


def refuse_not_finite(original: Any, changed: Any) -> None:
    """Raises `ValueError` for outputs of a changed network that are not finite where the original's are."""
    for expected, found in zip(tree_leaves(original), tree_leaves(changed), strict=True):
        if isinstance(expected, Tensor) and (expected.isfinite() & ~found.isfinite()).any():
            raise ValueError(
                "the compressed network gives NaN or infinity where the original's outputs are finite: try "
                'form="plain", or float32 if the network or precision is half'
            )
