"""Trace of one forward pass: how often each layer runs, which layers make the outputs, and the total cost."""

import logging
import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from facts.cost.count import counting, whole_forward
from facts.modules.linear_calls import skeleton
from facts.modules.modes import evaluating
from facts.utils.batches import batch_size, to_device

log = logging.getLogger(__name__)

UNABLE = (RuntimeError, TypeError, ValueError)  # raised by networks for inputs of another kind


@dataclass(frozen=True)
class Trace:
    """Work of the layers of a network for one sample.

    `rows` counts the vectors that each layer multiplies: 1 if no input is known, 0 for a layer that never runs.
    `outputs` are the layers that make the network's outputs, `unrelated` those whose inputs do not have samples
    along their first axis. `flops` counts the whole network by the paper's rule; None if it does not run on `meta`.
    """

    rows: dict[str, int]
    outputs: frozenset[str] = frozenset()
    unrelated: frozenset[str] = frozenset()
    flops: int | None = None


def trace_network(model: nn.Module, layers: Iterable[str], example: Any = None, inputs: Any = None) -> Trace:
    """Run the network on one and two copies of `example`, on the meta device; otherwise on `inputs`, a real batch."""
    layers = list(layers)
    if example is not None:
        try:
            return _trace_samples(skeleton(model), layers, example)
        except UNABLE as error:
            if inputs is None:
                raise
            first, *_ = str(error).splitlines() or [repr(error)]  # compilers write hundreds of lines
            log.warning("no FLOPs: %s does not run on the meta device (%s)", type(model).__name__, first)
    if inputs is None:
        return Trace(dict.fromkeys(layers, 1))
    inputs = to_device(inputs, next(model.parameters()).device)
    if has_row_per_sample(inputs):
        return replace(_trace_samples(model, layers, first_sample(inputs)), flops=None)
    whole, _ = _observe(model, layers, inputs)
    num_samples = batch_size(inputs)
    return Trace({name: rows // num_samples for name, rows in whole.rows.items()}, whole.outputs)


def has_row_per_sample(inputs: Any) -> bool:
    """Check that a batch is a tensor, or tensors by name, with one row per sample."""
    tensors = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
    return all(isinstance(tensor, Tensor) and tensor.ndim and len(tensor) == len(tensors[0]) for tensor in tensors)


def first_sample(inputs: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor[:1], inputs)


def _trace_samples(network: nn.Module, layers: list[str], sample: Any) -> Trace:
    trace, one = _observe(network, layers, sample)
    unrelated: list[str] = []
    try:
        _, two = _observe(network, layers, tree_map_only(Tensor, lambda tensor: torch.cat([tensor, tensor]), sample))
    except UNABLE:  # the network takes batches of one size only
        pass
    else:
        doubled = {name: [2 * shape[0] for shape in shapes] for name, shapes in one.items()}
        unrelated = [name for name in layers if doubled[name] != [shape[0] for shape in two[name]]]
    return replace(trace, unrelated=frozenset(unrelated))


def _observe(network: nn.Module, layers: list[str], inputs: Any) -> tuple[Trace, dict[str, list[torch.Size]]]:
    """Trace one forward pass; return also the shapes `[..., d]` of the inputs of each layer, one per call."""
    shapes: dict[str, list[torch.Size]] = {name: [] for name in layers}
    last: dict[str, Any] = {}

    def note(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        if not args:
            raise ValueError(f"layer {name} is called by keyword: call it as layer(x), so that its input can be seen")
        shapes[name].append(args[0].shape)
        last[name] = output

    with ExitStack() as stack, torch.no_grad(), evaluating(network):
        for name in layers:
            hook = network.get_submodule(name).register_forward_hook(partial(note, name))
            stack.callback(hook.remove)
        operations = stack.enter_context(counting(network, "paper"))
        outputs = {id(leaf) for leaf in tree_leaves(whole_forward(network)(inputs))}
    rows = {name: _num_rows(network.get_submodule(name), shapes[name]) for name in layers}
    made = frozenset(name for name, output in last.items() if id(output) in outputs)
    return Trace(rows, made, flops=sum(operations)), shapes


def _num_rows(layer: nn.Module, shapes: list[torch.Size]) -> int:
    """Number of vectors in tensors of these shapes; for a convolution, of the pixels that its stride keeps."""
    if not isinstance(layer, nn.Conv2d):
        return sum(math.prod(shape[:-1]) for shape in shapes)
    down, right = layer.stride
    return sum(shape[:-3].numel() * -(-shape[-2] // down) * -(-shape[-1] // right) for shape in shapes)
