"""Which layers of a network are compressed, how often each runs, and why others are left alone."""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from facts.cost import count_rows, num_vectors, seen_shapes
from facts.layers import batch_size, linear_layers, pointwise_convolutions, reasons_to_skip, select_layers
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
    example: Tensor | None


def choose_layers(
    model: nn.Module, names: Iterable[str] | None, convolutions: bool | None, example: Tensor | None, inputs: Any
) -> Selection:
    """The layers of these names; or all that are worth it, with `convolutions` the 1x1 ones too: if None, where there
    is no linear layer.

    `inputs` are a batch of the data, if there are any: a network runs on them that cannot run on the meta device.
    Raises `ValueError` for an unknown name, or where no layer is left.
    """
    reasons = reasons_to_skip(model)
    candidates = linear_layers(model) | pointwise_convolutions(model)
    pointwise = pointwise_convolutions(model).keys()
    if names is not None:
        names = list(names)
        converted = [name for name in names if name in pointwise]
        names = [f"{name}.linear" if name in pointwise else name for name in names]
    elif convolutions or (convolutions is None and linear_layers(model).keys() <= reasons.keys()):
        converted = [name for name in pointwise if name not in reasons]
    else:
        converted = []
    model = with_linear_layers(model, converted)
    layers = select_layers(model, names)
    rows, idle, example = _work(model, layers, example, inputs)
    if names is None:
        layers = {name: layer for name, layer in layers.items() if name not in idle}
        reasons |= {_own_name(name, candidates): reason for name, reason in idle.items()}
        others = candidates.keys() - reasons.keys()
        reasons |= dict.fromkeys(others, "it is a 1x1 convolution: convolutions=True takes it too")
    else:
        reasons = dict.fromkeys(candidates, "it was not named")
    taken = {_own_name(name, candidates) for name in layers}
    skipped = {name: reasons[name] for name in candidates if name not in taken}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layer to compress: {skipped}. Name the layers")
    return Selection(model, layers, skipped, {name: rows[name] for name in layers}, example)


def _own_name(name: str, candidates: Collection[str]) -> str:
    """Of a layer in the network as it was given: there a convolution has no `.linear`."""
    return name if name in candidates else name.removesuffix(".linear")


def _work(
    model: nn.Module, layers: Mapping[str, nn.Linear], example: Tensor | None, inputs: Any
) -> tuple[dict[str, int], dict[str, str], Tensor | None]:
    """How many vectors each layer multiplies for a sample, which layers do nothing for it, with the reason, and the
    example, if the network runs on it."""
    if example is not None:
        try:
            return *_counted(model, layers, example), example
        except RuntimeError as error:
            if inputs is None:
                raise
            log.warning("no FLOPs: %s does not run on the meta device (%s)", type(model).__name__, error)
    if inputs is None:
        return dict.fromkeys(layers, 1), {}, None
    inputs = to_device(inputs, next(model.parameters()).device)
    if _can_be_divided(inputs):
        return *_counted(model, layers, tree_map_only(Tensor, lambda tensor: tensor[:1], inputs)), None
    rows = count_rows(model, layers, inputs)
    return {name: count // batch_size(inputs) for name, count in rows.items()}, _never_run(rows), None


def _counted(model: nn.Module, layers: Mapping[str, nn.Linear], sample: Any) -> tuple[dict[str, int], dict[str, str]]:
    twice = tree_map_only(Tensor, lambda tensor: torch.cat([tensor, tensor]), sample)
    of_one, of_two = (seen_shapes(model, layers, inputs) for inputs in (sample, twice))
    unrelated = [name for name in layers if [2 * shape[0] for shape in of_one[name]] != [s[0] for s in of_two[name]]]
    rows = {name: num_vectors(shapes) for name, shapes in of_one.items()}
    return rows, _never_run(rows) | dict.fromkeys(unrelated, "its inputs do not have the samples for their first axis")


def _never_run(rows: Mapping[str, int]) -> dict[str, str]:
    reason = "it is never called: its weight goes unused, or is read by other code"
    return {name: reason for name, count in rows.items() if not count}


def _can_be_divided(inputs: Any) -> bool:
    """Whether each tensor has a row a sample."""
    tensors = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
    return all(isinstance(tensor, Tensor) and tensor.ndim and len(tensor) == len(tensors[0]) for tensor in tensors)
