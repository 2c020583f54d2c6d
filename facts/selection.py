"""Which layers of a network are compressed, how often each runs, and why others are left alone."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from facts.cost import num_vectors, watched
from facts.layers import (
    MAKES_OUTPUTS,
    batch_size,
    linear_layers,
    pointwise_convolutions,
    reasons_to_skip,
    select_layers,
)
from facts.moments.data_pass import to_device
from facts.networks import with_linear_layers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection:
    """A network in which the layers to compress are linear ones, and why others were skipped.

    `rows` says how many vectors each layer multiplies for one sample (1 where no input is known); `example` is one
    sample on the meta device, for which cost can be counted, or None.
    """

    model: nn.Module
    layers: dict[str, nn.Linear]
    skipped: dict[str, str]
    rows: dict[str, int]
    example: Any


def choose_layers(
    model: nn.Module, names: Iterable[str] | None, convolutions: bool | None, example: Any, inputs: Any
) -> Selection:
    """The layers of these names; or all that are worth it, with `convolutions` the 1x1 ones too: if None, where there
    is no linear layer.

    `inputs` are a batch of the data, if there are any: a network runs on them that cannot run on the meta device.
    Raises `ValueError` for an unknown name, or where no layer is left.
    """
    model = with_linear_layers(model)
    pointwise = pointwise_convolutions(model)
    candidates = [name for name, _ in model.named_modules() if name in linear_layers(model) or name in pointwise]
    reasons = reasons_to_skip(model)
    works, example = _works(model, candidates, example, inputs)
    reasons |= {name: reason for name, reason in works.reasons.items() if name not in reasons}
    if names is not None:
        taken = _known(names, candidates, model)
        reasons = dict.fromkeys(candidates, "it was not named")
    elif convolutions or (convolutions is None and linear_layers(model).keys() <= reasons.keys()):
        taken = [name for name in candidates if name not in reasons]
    else:
        taken = [name for name in candidates if name not in reasons and name not in pointwise]
        reasons |= dict.fromkeys(
            pointwise.keys() - reasons.keys(), "it is a 1x1 convolution: convolutions=True takes it too"
        )
    skipped = {name: reasons[name] for name in candidates if name not in taken}
    if not taken:
        raise ValueError(
            f"{type(model).__name__} has no layer to compress: "
            f"{'; '.join(f'{name}: {reason}' for name, reason in skipped.items()) or 'none is linear'}. Name the layers"
        )
    model = with_linear_layers(model, [name for name in taken if name in pointwise])
    layers = select_layers(model, [f"{name}.linear" if name in pointwise else name for name in taken])
    rows = {layer: works.rows[name] for layer, name in zip(layers, taken, strict=True)}
    return Selection(model, layers, skipped, rows, example)


def _known(names: Iterable[str], candidates: list[str], model: nn.Module) -> list[str]:
    """The layers of these names, by the names of the network as it was given: there a convolution has no `.linear`."""
    if isinstance(names, str):
        raise ValueError(f"layers are given as a list of names: [{names!r}]")
    known = [name if name in candidates else name.removesuffix(".linear") for name in names]
    if unknown := [name for name in known if name not in candidates]:
        raise ValueError(
            f"no linear layer or 1x1 convolution is called {', '.join(unknown)}; {type(model).__name__} has "
            f"{', '.join(candidates)}"
        )
    return known


@dataclass(frozen=True)
class _Works:
    """How many vectors each layer multiplies for a sample, and of which it is of no use to compress them, with why."""

    rows: dict[str, int]
    reasons: dict[str, str]


def _works(model: nn.Module, layers: list[str], example: Any, inputs: Any) -> tuple[_Works, Any]:
    """What the layers do, and the example, if the network runs on it."""
    if example is not None:
        try:
            return _watched(model, layers, example), example
        except (RuntimeError, TypeError, ValueError) as error:
            if inputs is None:
                raise
            log.warning("no FLOPs: %s does not run on the meta device (%s)", type(model).__name__, error)
    if inputs is None:
        return _Works(dict.fromkeys(layers, 1), {}), None
    inputs = to_device(inputs, next(model.parameters()).device)
    if has_row_per_sample(inputs):
        return _watched(model, layers, tree_map_only(Tensor, lambda tensor: tensor[:1], inputs)), None
    whole, heads = watched(model, layers, inputs)
    rows = {name: _num_rows(model.get_submodule(name), shapes) // batch_size(inputs) for name, shapes in whole.items()}
    return _Works(rows, _never_run(rows) | dict.fromkeys(heads, MAKES_OUTPUTS)), None


def _watched(model: nn.Module, layers: list[str], sample: Any) -> _Works:
    twice = tree_map_only(Tensor, lambda tensor: torch.cat([tensor, tensor]), sample)
    of_one, heads = watched(model, layers, sample)
    try:
        of_two, _ = watched(model, layers, twice)
    except (RuntimeError, TypeError, ValueError):  # a network for batches of one size
        unrelated = []
    else:
        doubled = {name: [2 * shape[0] for shape in shapes] for name, shapes in of_one.items()}
        unrelated = [name for name in layers if doubled[name] != [shape[0] for shape in of_two[name]]]
    rows = {name: _num_rows(model.get_submodule(name), shapes) for name, shapes in of_one.items()}
    reasons = dict.fromkeys(unrelated, "its inputs do not have the samples for their first axis")
    return _Works(rows, reasons | _never_run(rows) | dict.fromkeys(heads, MAKES_OUTPUTS))


def _num_rows(layer: nn.Module, shapes: list[torch.Size]) -> int:
    """Of a convolution those are the pixels that it steps on."""
    if not isinstance(layer, nn.Conv2d):
        return num_vectors(shapes)
    down, right = layer.stride
    return sum(shape[:-3].numel() * -(-shape[-2] // down) * -(-shape[-1] // right) for shape in shapes)


def _never_run(rows: Mapping[str, int]) -> dict[str, str]:
    reason = "it is never called: its weight goes unused, or is read by other code"
    return {name: reason for name, count in rows.items() if not count}


def has_row_per_sample(inputs: Any) -> bool:
    """Whether a batch is a tensor, or some by name, with as many rows as there are samples."""
    tensors = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
    return all(isinstance(tensor, Tensor) and tensor.ndim and len(tensor) == len(tensors[0]) for tensor in tensors)
