"""Towers: parts of a larger network that are compressed by themselves, such as the vision tower of a language model."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from facts.calibration.data import as_batches
from facts.cost.count import Cost, Size, count_params
from facts.modules.linear_calls import copy_with, replace_submodule
from facts.modules.modes import evaluating
from facts.modules.networks import is_transformers, run
from facts.result import CompressionResult
from facts.utils.batches import to_device

Value = TypeVar("Value")


class _Reached(Exception):
    """Ends a forward pass at the tower, with its arguments."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]):
        self.args, self.kwargs = args, kwargs


@dataclass(frozen=True)
class TowerInputs:
    """The inputs that the submodule `tower` of a network gets, batch by batch, captured again in every pass."""

    model: nn.Module
    tower: str
    data: Iterable[Any]

    def __iter__(self) -> Iterator[Tensor | dict[str, Tensor]]:
        return (self._captured(inputs) for inputs, _ in self.data)

    @torch.no_grad()
    def _captured(self, inputs: Any) -> Tensor | dict[str, Tensor]:
        def reach(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            raise _Reached(args, kwargs)

        tower = self.model.get_submodule(self.tower)
        with ExitStack() as stack:
            stack.enter_context(evaluating(self.model))
            stack.callback(tower.register_forward_pre_hook(reach, with_kwargs=True).remove)
            try:
                run(self.model, to_device(inputs, next(self.model.parameters()).device))
            except _Reached as reached:
                return self._tensors(tower, reached)
        raise ValueError(f"{self.tower} does not run on these data: is an input missing, such as pixel_values?")

    def _tensors(self, tower: nn.Module, reached: _Reached) -> Tensor | dict[str, Tensor]:
        """The arguments that are tensors, by name unless there is only the first; others are settings."""
        parameters = inspect.signature(tower.forward).parameters
        found = {
            name: value for name, value in zip(parameters, reached.args, strict=False) if isinstance(value, Tensor)
        }
        found |= {name: value for name, value in reached.kwargs.items() if isinstance(value, Tensor)}
        if [*found] == [*parameters][:1]:
            return next(iter(found.values()))
        if found and is_transformers(tower):
            return found
        raise ValueError(
            f"{self.tower} takes the tensors {', '.join(found)}, and only a module of transformers can take more than "
            f'its first argument: compress its layers within the network, with layers="{self.tower}.*"'
        )


def tower_inputs(model: nn.Module, tower: str, data: Iterable[Any]) -> TowerInputs:
    """Capture the inputs that the submodule called `tower` gets when the network runs on `data`, for `facts.compress`.

    `data` are those of the whole network, as in `facts.compress`. Each pass ends at the tower's first call: nothing
    behind it runs. Raises `ValueError` if there is no such submodule, and later if the tower is not called, or takes
    several tensors without being one of transformers' networks.
    """
    _refuse_unknown(model, tower)
    batches = as_batches(data, model)
    assert batches is not None
    return TowerInputs(model, tower, batches)


def put_back(result: CompressionResult, model: nn.Module, tower: str) -> CompressionResult:
    """Put a compressed tower back into a copy of its network, and return the result for the whole.

    It can be saved, loaded, exported and recovered like any other. Costs are of the whole network (FLOPs unknown), the
    budget is the tower's, and the distance between outputs is unknown. Raises `ValueError` for a tower that was not
    made from this submodule, or that shares weights with the rest of the network.
    """
    _refuse_unknown(model, tower)
    own = {*model.get_submodule(tower).parameters()}
    if result.original is None or own.isdisjoint(result.original.parameters()):
        raise ValueError(f"this result was not made from {tower} of this {type(model).__name__}")
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in own and not name.startswith(f"{tower}."):
            raise ValueError(f'{tower} shares {name}: compress it within the network, with layers="{tower}.*"')
    whole = copy_with(model)
    replace_submodule(whole, tower, copy_with(result.model))

    def renamed(values: Mapping[str, Value]) -> dict[str, Value]:
        return {f"{tower}.{name}": value for name, value in values.items()}

    summary = replace(
        result.summary,
        before=Cost(None, count_params(model)),
        after=Cost(None, count_params(whole)),
        sizes=(Size.of(model), Size.of(whole)),
        full_flops=None,
        latency={},
        latency_device=None,
        predicted=None,
        distance=None,
        repaired=renamed(result.summary.repaired),
        widths=renamed(result.summary.widths),
        profile=renamed(result.summary.profile),
    )
    return CompressionResult(whole, renamed(result.plan), summary, renamed(result.skipped), original=model)


def _refuse_unknown(model: nn.Module, tower: str) -> None:
    if tower not in (known := [name for name, _ in model.named_modules() if name]):
        near = [name for name in known if name.count(".") <= tower.count(".")]
        raise ValueError(f"{type(model).__name__} has no submodule {tower!r}, only {', '.join(near)}")
