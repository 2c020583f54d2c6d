"""Selection of the layers to compress, and the reasons why others are left alone."""

import fnmatch
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import nn

from facts.calibration.reasons import (
    EXCLUDED_NAMES,
    MAKES_OUTPUTS,
    linear_layers,
    pointwise_convolutions,
    reason_not_plain,
    reasons_shared,
    reasons_to_skip,
)
from facts.cost.trace import trace_network
from facts.modules.linear_calls import with_linear_layers

NEVER_USED = "it is never called: another module may read its weight"
NOT_PER_SAMPLE = "its inputs do not have samples along their first axis"
NOT_REACHED = "the loss does not depend on it"
NOT_NAMED = "not among the layers named"
POINTWISE = 'it is a 1x1 convolution: layers="all" takes it too'

LayerNames = Iterable[str] | str | None
"""Names of layers, and patterns such as `vision_tower.*` for those worth compressing among the layers they match;
`all` worth compressing, with 1x1 convolutions; or `linear` ones. None: linear, or all if none is."""


@dataclass(frozen=True)
class Selection:
    """A network in which the layers to compress are linear, and the reasons why others are skipped.

    `rows` counts the vectors that each layer multiplies for one sample (1 if no input is known); `flops` counts the
    whole network by the paper's rule; None if unknown.
    """

    model: nn.Module
    layers: dict[str, nn.Linear]
    rows: dict[str, int]
    skipped: dict[str, str]
    flops: int | None

    def without(self, names: Collection[str], reason: str) -> Self:
        """The same selection without some layers. Raises `ValueError` if none is left."""
        layers = {name: layer for name, layer in self.layers.items() if name not in names}
        if not layers:
            raise ValueError(f"no layer is left to compress: {', '.join(names)}: {reason}")
        return replace(self, layers=layers, skipped=self.skipped | dict.fromkeys(names, reason))


def is_pattern(names: LayerNames) -> bool:
    """Whether only patterns, such as `vision_tower.*`, select layers."""
    given = [names] if isinstance(names, str) else names
    return isinstance(given, list | tuple) and bool(given) and all("*" in name for name in given)


def select_layers(
    model: nn.Module,
    names: LayerNames = None,
    *,
    excluded_names: Iterable[str] = EXCLUDED_NAMES,
    example: Any = None,
    inputs: Any = None,
) -> Selection:
    """Select the layers with these names, or those worth compressing (paper, section 5.1).

    The network is traced on `example`, a sample on the meta device, or on `inputs`, a batch of the data. Raises
    `ValueError` for an unknown name, or if no layer is left.
    """
    if adapters := [name for name, each in model.named_modules() if type(each).__module__.startswith("peft.tuners.")]:
        raise ValueError(
            f"{type(model).__name__} has adapters of PEFT ({adapters[-1]}): merge them first, with "
            "model = model.merge_and_unload(), so that the weights are what the network computes with"
        )
    model = with_linear_layers(model)
    linear, pointwise = linear_layers(model), pointwise_convolutions(model)
    candidates = [name for name, _ in model.named_modules() if name in linear or name in pointwise]
    trace = trace_network(model, candidates, example, inputs)
    never = [name for name, count in trace.rows.items() if not count]
    reasons = dict.fromkeys(trace.unrelated, NOT_PER_SAMPLE) | dict.fromkeys(never, NEVER_USED)
    reasons |= dict.fromkeys(trace.outputs, MAKES_OUTPUTS) | reasons_to_skip(model, excluded_names)
    if names not in (None, "all", "linear"):
        (chosen, matching), shared = _named(names, candidates, model), reasons_shared(model)
        for name in sorted(chosen):
            reason = shared.get(name) or reason_not_plain(model.get_submodule(name))  # type: ignore[arg-type]  # a layer
            if reason:
                raise ValueError(
                    f"layer {name} cannot be compressed: {reason}. Leave it out, or give it a plain weight of its own"
                )
        taken = [name for name in candidates if name in chosen or name in matching - reasons.keys()]
        reasons = {name: reasons[name] if name in matching and name in reasons else NOT_NAMED for name in candidates}
    elif names == "all" or (names is None and linear.keys() <= reasons.keys()):
        taken = [name for name in candidates if name not in reasons]
    else:
        taken = [name for name in candidates if name not in reasons and name not in pointwise]
        reasons = dict.fromkeys(pointwise, POINTWISE) | reasons
    skipped = {name: reasons[name] for name in candidates if name not in taken}
    if not taken:
        raise ValueError(
            f"{type(model).__name__} has no layer to compress: "
            f"{'; '.join(f'{name}: {reason}' for name, reason in skipped.items()) or 'none is linear'}. Name the layers"
        )
    model = with_linear_layers(model, [name for name in taken if name in pointwise])
    layers = linear_layers(model)
    renamed = {name: f"{name}.linear" if name in pointwise else name for name in taken}
    return Selection(
        model,
        {new: layers[new] for new in renamed.values()},
        {new: trace.rows[name] for name, new in renamed.items()},
        skipped,
        trace.flops,
    )


def _named(names: Iterable[str], candidates: list[str], model: nn.Module) -> tuple[set[str], set[str]]:
    """Find the layers that are named, a convolution without its `.linear`, and those that a pattern matches."""
    if isinstance(names, str) and not is_pattern(names):
        raise ValueError(
            f'layers are "all", "linear", a pattern such as "encoder.*", or given as a list of names: [{names!r}]'
        )
    chosen: set[str] = set()
    matching: set[str] = set()
    for name in [names] if isinstance(names, str) else names:
        found = fnmatch.filter(candidates, name) or {name.removesuffix(".linear")} & {*candidates}
        if not found:
            raise ValueError(
                f"no linear layer or 1x1 convolution is called {name}; {type(model).__name__} has "
                f"{', '.join(candidates)}"
            )
        (matching if "*" in name else chosen).update(found)
    return chosen, matching
