"""One probe of a network with the first sample of its data: what its layers see, what makes the outputs, the FLOPs."""

import logging
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from facts.cost.count import counting, whole_forward
from facts.modules.linear_calls import is_pointwise, skeleton, with_linear_layers
from facts.modules.networks import autocast, evaluating, hooked, run
from facts.utils.batches import (
    MISREAD,
    Refusal,
    batch_size,
    first_sample,
    has_row_per_sample,
    in_parts,
    reading,
    tensors_in,
    to_device,
)
from facts.utils.options import first_line

log = logging.getLogger(__name__)

NUM_TRIED = 7  # samples that show whether a layer sees one after the other
NUM_OTHERS = 64  # samples among which one with other values is looked for
NUMBER = re.compile(r"\d+")

Call = tuple[tuple, dict[str, Any]]
"""Arguments of a call of a module."""


@dataclass(frozen=True)
class Probe:
    """Findings from one sample about a network that is rewritten to call linear layers.

    `rows` counts the vectors that each linear layer and 1x1 convolution multiplies for one sample: 1 if no input is
    known, 0 for a layer that never runs. `makers` are the layers that make the network's outputs, `unrelated` those
    whose inputs are not one sample after the other along the first axis, as of experts. `flops` counts the whole
    network by the paper's rule; None if it does not run on the meta device. `outputs` are those of the `sample` in a
    `precision`, `calls` the arguments of the first call of each module that holds others; none without real inputs.
    `constant` are the number of rows `[1, rows, d]` of the inputs of such modules, and those that do not come from
    the data, such as class tokens: another sample, or noise in its place, does not change them. None is unknown.
    """

    rows: dict[str, int]
    makers: frozenset[str] = frozenset()
    unrelated: frozenset[str] | None = None
    flops: int | None = None
    sample: Any = None
    precision: torch.dtype = torch.float32
    outputs: Any = None
    calls: dict[str, Call] = field(default_factory=dict)
    constant: dict[str, tuple[int, tuple[int, ...]]] | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        inputs: Any = None,
        example: Any = None,
        precision: torch.dtype = torch.float32,
        batches: Iterable[tuple[Any, Any]] = (),
    ) -> "Probe":
        """Run the network on the first sample of a batch of `inputs`, and on `example`, a sample on the meta device.

        Of the `batches` that begin with `inputs`, others are read if only a sample of other integers shows what depends
        on the data. Raises `ValueError` if the network cannot read the inputs or changes them, or draws random numbers.
        """
        model = with_linear_layers(model)
        layers = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) or is_pointwise(each)]
        seen, traced = cls(dict.fromkeys(layers, 1)), None
        if inputs is not None:
            seen = _of_sample(model, layers, inputs, precision, batches)
        if example is not None:
            try:
                traced = _traced(skeleton(model), layers, example, seen.unrelated is None)
            except MISREAD as error:
                if inputs is None:
                    raise
                first = first_line(error)
                log.warning("no FLOPs: %s does not run on the meta device (%s)", type(model).__name__, first)
        if traced is None and has_row_per_sample(inputs):
            sample = to_device(first_sample(inputs), next(model.parameters()).device)
            traced = replace(_traced(model, layers, sample, seen.unrelated is None), flops=None)
        if traced is None:
            return seen
        rows = traced.rows
        if inputs is not None:
            rows = {name: count or seen.rows[name] for name, count in rows.items()}
        unrelated = traced.unrelated if seen.unrelated is None else seen.unrelated
        return replace(seen, rows=rows, makers=traced.makers, unrelated=unrelated, flops=traced.flops)


def _varied(sample: Any, batches: Iterable[tuple[Any, Any]]) -> Any:
    """Noise in place of real numbers, and other integers from the data; None if nothing can be varied."""
    generator = torch.Generator().manual_seed(0)

    def noise(each: Tensor) -> Tensor:
        scale = each.std() if each.numel() > 1 and each.std() > 0 else 1
        return torch.randn(each.shape, generator=generator).to(each) * scale + each.mean()

    tensors = tensors_in(sample)
    if any(each.is_floating_point() for each in tensors):
        return tree_map_only(Tensor, lambda each: noise(each) if each.is_floating_point() else each, sample)
    readable = (batch for batch, _ in batches if has_row_per_sample(batch))
    samples = (part for batch in readable for part, _ in in_parts((batch, None), batch_size(batch)))
    for other in islice(samples, 1, NUM_OTHERS):
        others = tensors_in(other := to_device(other, tensors[0].device))
        are_alike = [each.shape for each in others] == [each.shape for each in tensors]
        if are_alike and not all(map(torch.equal, others, tensors)):
            return other
    return None


def _of_sample(
    model: nn.Module, layers: list[str], inputs: Any, precision: torch.dtype, batches: Iterable[Any]
) -> Probe:
    """Run the network on the first sample; on the whole batch if it cannot be divided."""
    device, is_divided = next(model.parameters()).device, has_row_per_sample(inputs)
    given = to_device(first_sample(inputs) if is_divided else inputs, device)
    sample = tree_map_only(Tensor, torch.clone, given)
    calls: dict[str, Call] = {}
    alone: dict[str, list[Tensor]] = {name: [] for name in layers}

    def note_rows(name: str, _: nn.Module, args: tuple[Tensor, ...], __: Any) -> None:
        for rows in args[:1]:  # of which the shape says all if the first axis is that of the samples
            alone[name].append(rows.clone() if len(rows) > 1 else rows.to("meta"))

    def note(name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        calls.setdefault(name, (args, kwargs))

    blocks = [(each, partial(note, name)) for name, each in model.named_modules() if name and [*each.children()]]
    inner = [(model.get_submodule(name), partial(note_rows, name)) for name in layers]
    with evaluating(model), autocast(device, precision), torch.no_grad(), hooked(before=blocks):
        with reading(model, inputs, "the first sample"), hooked(inner):
            seen, _ = _observe(model, layers, sample)
        if not are_close(given, sample):
            raise ValueError(
                f"{type(model).__name__} changes its inputs in place, so that the data would differ from pass to pass: "
                "let it change a clone of them"
            )
        several = _several(sample, inputs, batches) if is_divided else None
        unrelated, constant, again = _of_several(model, alone, calls, *several) if several else (None, None, None)
        if not _is_first(seen.outputs, again) and not are_close(seen.outputs, run(model, sample)):
            raise ValueError(
                f"{type(model).__name__} gives other outputs for the same inputs in evaluation mode, since it "
                "draws random numbers or remembers earlier calls: do so in training mode only"
            )
    num_samples = 1 if is_divided else batch_size(sample)
    rows = {name: rows // num_samples for name, rows in seen.rows.items()}
    return Probe(rows, seen.makers, unrelated, None, sample, precision, seen.outputs, calls, constant)


def are_close(one: Any, other: Any, digits: float = 0.5) -> bool:
    """Whether outputs are equal but for rounding, in this share of the digits of their type."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(
        a.shape == b.shape and not (a - b).norm() > torch.finfo(a.dtype).eps ** digits * a.norm()
        for a, b in pairs
        if isinstance(a, Tensor) and a.is_floating_point()
    )


def _is_first(outputs: Any, of_several: Any) -> bool:
    """Whether these are the outputs for the first of several samples."""
    tensors, others = tensors_in(outputs), tensors_in(of_several)
    have_rows = len(tensors) == len(others) > 0 and all(each.ndim for each in others)
    return have_rows and are_close(tensors, [each[:1] for each in others])


def _several(sample: Any, inputs: Any, batches: Iterable[tuple[Any, Any]]) -> tuple[Any, bool] | None:
    """The first samples of batches that begin with `inputs`, and whether one with other values is the last of them.

    None if no two samples fit in one batch.
    """
    few, other = tree_map_only(Tensor, itemgetter(slice(NUM_TRIED)), inputs), _varied(sample, batches)
    few = to_device(few, tensors_in(sample)[0].device)
    if other is not None:
        return tree_map(lambda one, another: torch.cat([one, another]), few, other), True
    return (few, False) if batch_size(few) > 1 else None


def _of_several(
    model: nn.Module, alone: dict[str, list[Tensor]], calls: Mapping[str, Call], samples: Any, has_other: bool
) -> tuple[frozenset[str] | None, dict[str, tuple[int, tuple[int, ...]]] | None, Any]:
    """Run several samples: which layers are unrelated, which rows of modules are constant, and the outputs.

    None is unknown; that of the rows needs a last sample with other values.

    Layers are unrelated if their rows are not those of the first sample, noted `alone`, then those of the next: they
    get the tokens of all samples in turns, or those that are sorted by expert. So are others of the same name but for
    its numbers, which may have got as many tokens of each sample by chance.
    """
    found, constant, num_samples = set[str](), dict[str, tuple[int, tuple[int, ...]]](), batch_size(samples)

    def compare(name: str, _: nn.Module, args: tuple[Tensor, ...], __: Any) -> None:
        rows, own = args[0], alone[name].pop(0) if alone[name] else None
        if own is None or rows.shape != (num_samples * len(own), *own.shape[1:]):
            found.add(name)
        elif not own.is_meta:
            first, second, *_ = rows.split(len(own))
            if (first - own).norm() > (second - own).norm() / 4 and not are_close(own, first):
                found.add(name)

    def note(name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        one, x = (each[0] if each else None for each in (calls[name][0], args))
        if not (isinstance(one, Tensor) and isinstance(x, Tensor)):
            return
        if x.ndim == 3 and x.shape == (num_samples, *one.shape[1:]):
            same = (x[0] == x[-1]).all(dim=-1)
            constant.setdefault(name, (len(same), tuple(same.nonzero().flatten().tolist())))

    before = [(model.get_submodule(name), partial(note, name)) for name in calls if has_other]
    try:
        with hooked([(model.get_submodule(name), partial(compare, name)) for name in alone], before):
            outputs = run(model, samples)
    except MISREAD:  # the network takes batches of one size only
        return None, None, None
    kinds = {NUMBER.sub("", name) for name in found.union(name for name in alone if alone[name])}
    unrelated = frozenset(name for name in alone if NUMBER.sub("", name) in kinds)
    return unrelated, constant if has_other else None, outputs


def _traced(network: nn.Module, layers: list[str], sample: Any, doubles: bool) -> Probe:
    """Trace one forward pass; if it `doubles`, the sample twice, too: the first axis of unrelated layers does not."""
    traced, shapes = _observe(network, layers, sample, with_flops=True)
    if not doubles:
        return traced
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
