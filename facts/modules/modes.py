"""Temporary modes of a network: evaluation, frozen parameters, autocast, other forward functions."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import nn


def autocast(device: torch.device, precision: torch.dtype) -> torch.autocast:
    """Autocast to `precision`; disabled for float32."""
    return torch.autocast(device.type, precision, enabled=precision != torch.float32)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Disable the caller's autocast within the block, and its cache, which would keep outdated casts of weights."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False, cache_enabled=False)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a network in evaluation mode within the block; every module returns to its own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Put a network in evaluation mode, without gradients of parameters, within the block."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with evaluating(model):
        try:
            model.requires_grad_(False)
            yield
        finally:
            for parameter in trainable:
                parameter.requires_grad_(True)


@contextmanager
def hooked(
    after: Iterable[tuple[nn.Module, Callable]] = (), before: Iterable[tuple[nn.Module, Callable]] = ()
) -> Iterator[None]:
    """Register forward hooks, and pre-hooks, which get keyword arguments too, on modules within the block."""
    with ExitStack() as stack:
        for module, hook in after:
            stack.callback(module.register_forward_hook(hook).remove)
        for module, hook in before:
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable]) -> Iterator[None]:
    own = {module: vars(module).get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, previous in own.items():
            vars(module).pop("forward", None)
            if previous is not None:
                module.forward = previous
