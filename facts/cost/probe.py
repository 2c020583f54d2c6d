"""One probe of a network with the first sample of its data: what its layers see, what makes the outputs, the FLOPs."""

import logging
import math
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from facts.cost.count import counting, whole_forward
from facts.modules.linear_calls import is_pointwise, skeleton, with_linear_layers
from facts.modules.networks import autocast, evaluating, frozen, run
from facts.utils.batches import batch_size, described, first_sample, has_row_per_sample, to_device

log = logging.getLogger(__name__)

# Raised by networks for inputs of another shape, size, type or name.
MISREAD = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
UNABLE = (RuntimeError, TypeError, ValueError)  # raised by networks for inputs of another kind

Call = tuple[tuple, dict[str, Any]]
"""Arguments of a call of a module."""


class _CalledByKeyword(ValueError):
    pass


@dataclass(frozen=True)
class Probe:
    """Findings from one sample about a network that is rewritten to call linear layers.

    `rows` counts the vectors that each linear layer and 1x1 convolution multiplies for one sample: 1 if no input is
    known, 0 for a layer that never runs. `makers` are the layers that make the network's outputs, `unrelated` those
    whose inputs do not have samples along their first axis. `flops` counts the whole network by the paper's rule; None
    if it does not run on the meta device. `outputs` are those of the sample, `calls` the arguments of the first call
    of each module that holds others; without real inputs there are none.
    """

    rows: dict[str, int]
    makers: frozenset[str] = frozenset()
    unrelated: frozenset[str] = frozenset()
    flops: int | None = None
    outputs: Any = None
    calls: dict[str, Call] = field(default_factory=dict)
    marks: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        inputs: Any = None,
        example: Any = None,
        precision: torch.dtype = torch.float32,
        marked: bool = False,
    ) -> "Probe":
        """Run the network on the first sample of a batch of `inputs`, and on `example`, a sample on the meta device.

        With `marked`, `without_effect` can be asked. Raises `ValueError` if the network cannot read the inputs.
        """
        model = with_linear_layers(model)
        layers = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) or is_pointwise(each)]
        seen = cls(dict.fromkeys(layers, 1))
        if inputs is not None:
            seen = _of_sample(model, layers, inputs, precision, marked)
        if example is None:
            return seen if inputs is None else _with_unrelated(seen, model, layers, inputs)
        try:
            traced, shapes = _observe(skeleton(model), layers, example)
            unrelated = _unrelated(skeleton(model), layers, example, shapes)
        except UNABLE as error:
            if inputs is None:
                raise
            first, *_ = str(error).splitlines() or [repr(error)]  # compilers write hundreds of lines
            log.warning("no FLOPs: %s does not run on the meta device (%s)", type(model).__name__, first)
            return _with_unrelated(seen, model, layers, inputs)
        return replace(seen, rows=traced.rows, makers=traced.makers, unrelated=unrelated, flops=traced.flops)

    def without_effect(self, value: Tensor) -> list[str]:
        """Layers that do not affect a value computed from `outputs`, such as a pooler whose output is not used."""
        grads = torch.autograd.grad(value, list(self.marks.values()), allow_unused=True)
        return [name for name, grad in zip(self.marks, grads, strict=True) if grad is None]


def _of_sample(model: nn.Module, layers: list[str], inputs: Any, precision: torch.dtype, marked: bool) -> Probe:
    """Run the network on the first sample; on the whole batch if it cannot be divided."""
    device, is_divided = next(model.parameters()).device, has_row_per_sample(inputs)
    sample = to_device(first_sample(inputs) if is_divided else inputs, device)
    calls: dict[str, Call] = {}
    marks = {name: torch.zeros((), device=device, requires_grad=True) for name in layers if marked}

    def note(name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        calls.setdefault(name, (args, kwargs))

    with ExitStack() as stack:
        stack.enter_context(frozen(model) if marked else evaluating(model))
        stack.enter_context(autocast(device, precision))
        stack.enter_context(torch.set_grad_enabled(marked))
        for name, module in model.named_modules():
            if name and any(True for _ in module.children()):
                stack.callback(module.register_forward_pre_hook(partial(note, name), with_kwargs=True).remove)
        try:
            seen, _ = _observe(model, layers, sample, marks)
        except (_CalledByKeyword, torch.OutOfMemoryError):
            raise
        except MISREAD as error:
            first, *_ = str(error).splitlines() or [repr(error)]
            raise ValueError(
                f"{type(model).__name__} cannot read the first sample of {described(inputs)} ({first}): a batch has "
                "its samples along the first axis, images as [N, C, H, W] in the type of the weights; it is (inputs, "
                "targets), or a mapping if the network takes inputs by name"
            ) from error
    num_samples = 1 if is_divided else batch_size(sample)
    rows = {name: rows // num_samples for name, rows in seen.rows.items()}
    return replace(seen, rows=rows, flops=None, calls=calls, marks=marks)


def _with_unrelated(seen: Probe, model: nn.Module, layers: list[str], inputs: Any) -> Probe:
    if not has_row_per_sample(inputs):
        return seen
    sample = to_device(first_sample(inputs), next(model.parameters()).device)
    traced, shapes = _observe(model, layers, sample)
    unrelated = _unrelated(model, layers, sample, shapes)
    return replace(seen, rows=traced.rows, makers=traced.makers, unrelated=unrelated)


def _unrelated(
    network: nn.Module, layers: list[str], sample: Any, shapes: dict[str, list[torch.Size]]
) -> frozenset[str]:
    """Layers whose first axis does not double with the samples."""
    try:
        twice = tree_map_only(Tensor, lambda tensor: torch.cat([tensor, tensor]), sample)
        _, doubled = _observe(network, layers, twice)
    except UNABLE:  # the network takes batches of one size only
        return frozenset()
    expected = {name: [2 * shape[0] for shape in shapes[name]] for name in layers}
    return frozenset(name for name in layers if expected[name] != [shape[0] for shape in doubled[name]])


def _observe(
    network: nn.Module, layers: Iterable[str], inputs: Any, marks: dict[str, Tensor] | None = None
) -> tuple[Probe, dict[str, list[torch.Size]]]:
    """Trace one forward pass; return also the shapes `[..., d]` of the inputs of each layer, one per call."""
    shapes: dict[str, list[torch.Size]] = {name: [] for name in layers}
    last: dict[str, Any] = {}

    def note(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Any) -> Any:
        if not args:
            raise _CalledByKeyword(
                f"layer {name} is called by keyword: call it as layer(x), so that its input can be seen"
            )
        shapes[name].append(args[0].shape)
        if marks:
            output = output + marks[name].to(output)
        last[name] = output
        return output

    with ExitStack() as stack, torch.set_grad_enabled(bool(marks)), evaluating(network):
        for name in shapes:
            hook = network.get_submodule(name).register_forward_hook(partial(note, name))
            stack.callback(hook.remove)
        operations = stack.enter_context(counting(network, "paper")) if marks is None else []
        result = whole_forward(network)(inputs) if marks is None else run(network, inputs)
    outputs = {id(leaf) for leaf in tree_leaves(result)}
    rows = {name: _num_rows(network.get_submodule(name), shapes[name]) for name in shapes}
    makers = frozenset(name for name, output in last.items() if id(output) in outputs)
    return Probe(rows, makers, flops=sum(operations), outputs=result), shapes


def _num_rows(layer: nn.Module, shapes: list[torch.Size]) -> int:
    """Number of vectors in tensors of these shapes; for a convolution, of the pixels that its stride keeps."""
    if not isinstance(layer, nn.Conv2d):
        return sum(math.prod(shape[:-1]) for shape in shapes)
    down, right = layer.stride
    return sum(shape[:-3].numel() * -(-shape[-2] // down) * -(-shape[-1] // right) for shape in shapes)
