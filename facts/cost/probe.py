"""One probe of a network with the first sample of its data: what its layers see, what makes the outputs, the FLOPs."""

import logging
import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, zip_longest
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from facts.cost.count import counting, whole_forward
from facts.modules.linear_calls import is_pointwise, skeleton, with_linear_layers
from facts.modules.networks import autocast, evaluating, hooked, run
from facts.utils.batches import MISREAD, Refusal, batch_size, first_sample, has_row_per_sample, reading, to_device
from facts.utils.options import first_line

log = logging.getLogger(__name__)

Call = tuple[tuple, dict[str, Any]]
"""Arguments of a call of a module."""


@dataclass(frozen=True)
class Probe:
    """Findings from one sample about a network that is rewritten to call linear layers.

    `rows` counts the vectors that each linear layer and 1x1 convolution multiplies for one sample: 1 if no input is
    known, 0 for a layer that never runs. `makers` are the layers that make the network's outputs, `unrelated` those
    whose inputs do not have samples along their first axis. Those `by_token` get the first token of all samples first,
    `[T, N, d]` or `[T·N, d]`. `mixes` says that others get rows of several samples in turns, as of tokens sorted by
    expert: only batches of one sample tell them apart. `flops` counts the whole network by the paper's rule; None if it
    does not run on the meta device. `outputs` are those of the `sample` in a `precision`, `calls` the arguments of the
    first call of each module that holds others; without real inputs there are none.
    """

    rows: dict[str, int]
    makers: frozenset[str] = frozenset()
    unrelated: frozenset[str] = frozenset()
    by_token: frozenset[str] = frozenset()
    mixes: bool = False
    flops: int | None = None
    sample: Any = None
    precision: torch.dtype = torch.float32
    outputs: Any = None
    calls: dict[str, Call] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        inputs: Any = None,
        example: Any = None,
        precision: torch.dtype = torch.float32,
        further: Iterable[tuple[Any, Any]] = (),
    ) -> "Probe":
        """Run the network on the first sample of a batch of `inputs`, and on `example`, a sample on the meta device.

        `further` batches are read if there are layers, such as experts, that the first sample does not reach, or if
        `inputs` are of one sample, until a batch has two. Raises `ValueError` if the network cannot read the inputs or
        changes them, or draws random numbers.
        """
        model = with_linear_layers(model)
        layers = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) or is_pointwise(each)]
        seen, traced = cls(dict.fromkeys(layers, 1)), None
        if inputs is not None:
            seen = _of_sample(model, layers, inputs, precision, further)
        if example is not None:
            try:
                traced = _traced(skeleton(model), layers, example)
            except MISREAD as error:
                if inputs is None:
                    raise
                first = first_line(error)
                log.warning("no FLOPs: %s does not run on the meta device (%s)", type(model).__name__, first)
        if traced is None and has_row_per_sample(inputs):
            sample = to_device(first_sample(inputs), next(model.parameters()).device)
            traced = replace(_traced(model, layers, sample), flops=None)
        if traced is None:
            return seen
        rows = traced.rows
        if inputs is not None:
            rows = {name: count or seen.rows[name] for name, count in rows.items()}
        several = chain([inputs], (each for each, _ in further)) if has_row_per_sample(inputs) else ()
        pair = next((each for each in several if has_row_per_sample(each) and batch_size(each) > 1), None)
        by_token, mixing = _orders(model, [name for name in rows if rows[name]], traced.unrelated, pair)
        return replace(
            seen,
            rows=rows,
            makers=traced.makers,
            unrelated=traced.unrelated - by_token,
            by_token=by_token,
            mixes=bool(mixing - traced.unrelated),
            flops=traced.flops,
        )


def _of_sample(
    model: nn.Module, layers: list[str], inputs: Any, precision: torch.dtype, further: Iterable[Any]
) -> Probe:
    """Run the network on the first sample; on the whole batch if it cannot be divided."""
    device, is_divided = next(model.parameters()).device, has_row_per_sample(inputs)
    given = to_device(first_sample(inputs) if is_divided else inputs, device)
    sample = tree_map_only(Tensor, torch.clone, given)
    calls: dict[str, Call] = {}

    def note(name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        calls.setdefault(name, (args, kwargs))

    blocks = [(each, partial(note, name)) for name, each in model.named_modules() if name and [*each.children()]]
    with evaluating(model), autocast(device, precision), torch.no_grad(), hooked(before=blocks):
        with reading(model, inputs, "the first sample"):
            seen, _ = _observe(model, layers, sample)
        if not are_close(given, sample):
            raise ValueError(
                f"{type(model).__name__} changes its inputs in place, so that the data would differ from pass to pass: "
                "let it change a clone of them"
            )
        if not are_close(seen.outputs, run(model, sample)):
            raise ValueError(
                f"{type(model).__name__} gives other outputs for the same inputs in evaluation mode, since it "
                "draws random numbers or remembers earlier calls: do so in training mode only"
            )
        reached: dict[str, int] = {}  # vectors per sample of layers that other batches reach
        missed = [name for name in layers if not seen.rows[name]]
        for batch, _ in further if missed else ():
            others, _ = _observe(model, missed, to_device(batch, device))
            reached |= {name: max(1, rows // batch_size(batch)) for name, rows in others.rows.items() if rows}
            missed = [name for name in missed if name not in reached]
            if not missed:
                break
    num_samples = 1 if is_divided else batch_size(sample)
    rows = {name: rows // num_samples for name, rows in seen.rows.items()}
    return replace(seen, rows=rows | reached, flops=None, sample=sample, precision=precision, calls=calls)


def are_close(one: Any, other: Any, digits: float = 0.5) -> bool:
    """Whether outputs are equal but for rounding, in this share of the digits of their type."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(
        a.shape == b.shape and not (a - b).norm() > torch.finfo(a.dtype).eps ** digits * a.norm()
        for a, b in pairs
        if isinstance(a, Tensor) and a.is_floating_point()
    )


def _orders(
    model: nn.Module, layers: list[str], unrelated: frozenset[str], inputs: Any
) -> tuple[frozenset[str], frozenset[str]]:
    """The layers whose rows come token by token, and those with another order of two samples than one by one.

    If the samples are swapped, so are the halves of all rows, or neighbours. Without two samples, there are neither.
    """
    if inputs is None:
        return frozenset(), frozenset()
    device = next(model.parameters()).device
    calls: list[dict[str, list[Tensor]]] = []
    for order in ([0, 1], [1, 0]):
        seen: dict[str, list[Tensor]] = {name: [] for name in layers}

        def note(name: str, _: nn.Module, args: tuple[Tensor, ...], __: Any, seen: Any = seen) -> None:
            if len(args[0]) != 2 or name in unrelated:  # otherwise its first axis is that of the samples
                seen[name].append(args[0].detach().clone())

        hooks = [(model.get_submodule(name), partial(note, name)) for name in layers]
        pair = tree_map_only(Tensor, itemgetter(order), inputs)
        try:
            with torch.no_grad(), evaluating(model), hooked(hooks):
                run(model, to_device(pair, device))
        except MISREAD:  # the network takes batches of one size only
            return frozenset(), frozenset()
        calls.append(seen)
    pairs = {name: list(zip_longest(*(each[name] for each in calls))) for name in layers}
    mixing = {name for name in layers if not all(_swaps(pair, by_token=False) for pair in pairs[name])}
    by_token = {name for name in mixing if all(_swaps(pair, by_token=True) for pair in pairs[name])}
    return frozenset(by_token), frozenset(mixing - by_token)


def _swaps(pair: tuple[Any, ...], by_token: bool) -> bool:
    """Whether neighbouring rows, or else the halves of all rows, are swapped."""
    one, other = pair
    if one is None or other is None or one.shape != other.shape or one.shape[:-1].numel() % 2:
        return False
    axis, shape = (1, (-1, 2)) if by_token else (0, (2, -1))
    rows, swapped = (each.flatten(0, -2).unflatten(0, shape) for each in (one, other))
    return are_close(rows, swapped.flip(axis))


def _traced(network: nn.Module, layers: list[str], sample: Any) -> Probe:
    """Trace one forward pass, and one with the sample twice: the first axis of unrelated layers does not double."""
    traced, shapes = _observe(network, layers, sample, with_flops=True)
    try:
        twice = tree_map_only(Tensor, lambda tensor: torch.cat([tensor, tensor]), sample)
        _, doubled = _observe(network, layers, twice, with_flops=True)
    except MISREAD:  # the network takes batches of one size only
        return traced
    expected = {name: [2 * shape[0] for shape in shapes[name]] for name in layers}
    unrelated = (name for name in layers if expected[name] != [shape[0] for shape in doubled[name]])
    return replace(traced, unrelated=frozenset(unrelated))


def _observe(
    network: nn.Module, layers: Iterable[str], inputs: Any, with_flops: bool = False
) -> tuple[Probe, dict[str, list[torch.Size]]]:
    """Trace one forward pass; return also the shapes `[..., d]` of the inputs of each layer, one per call."""
    shapes: dict[str, list[torch.Size]] = {name: [] for name in layers}
    last: dict[str, Any] = {}

    def note(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        if not args:
            raise Refusal(f"layer {name} is called by keyword: call it as layer(x), so that its input can be seen")
        shapes[name].append(args[0].shape)
        last[name] = output

    hooks = [(network.get_submodule(name), partial(note, name)) for name in shapes]
    count = counting(network, "paper") if with_flops else nullcontext(list[int]())
    with torch.no_grad(), evaluating(network), hooked(hooks), count as operations:
        result = whole_forward(network)(inputs) if with_flops else run(network, inputs)
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
