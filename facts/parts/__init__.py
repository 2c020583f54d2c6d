"""Find the parts of a network, and put them at the ranks of a plan; one file for each kind of part."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from facts.cost.probe import Probe, are_close
from facts.decomposition.truncation import Decomposition
from facts.modules.forms import PLAIN, Form, Layout, Pivoted
from facts.modules.linear_calls import (
    PointwiseConvolution,
    copy_with,
    is_pointwise,
    replace_submodule,
    stand_in,
    with_linear_layers,
)
from facts.modules.networks import autocast, evaluating, run, type_of
from facts.parts.attention import Attention
from facts.parts.base import USED_ELSEWHERE, Description, Found, Kind, Part, Plan, module_at
from facts.parts.hidden import Hidden
from facts.parts.layers import LayerPart, Selection
from facts.parts.tokens import TokensOfBlocks
from facts.utils.version import RESULTS

KINDS: dict[str, tuple[Kind, ...]] = {"layers": (), "units": (Attention(), Hidden()), "tokens": (TokensOfBlocks(),)}
"""Kinds of parts by the name that chooses them. Linear layers in none of them are parts too, unless only tokens are."""

__all__ = ["KINDS", "Found", "Kind", "Part", "Plan", "apply", "emptied", "find", "part_at", "put", "rewritten"]


def find(
    selection: Selection, chosen: str, probe: Probe, form: Form = PLAIN, protected: int | None = None
) -> tuple[dict[str, Part], dict[str, str]]:
    """Find the parts of the `chosen` kinds, such as `units,tokens`, among selected layers, in the network's order.

    The first `protected` tokens are never merged (None finds out how many). Returns also the reasons why candidates
    were left alone. Raises `ValueError` if candidates cannot be run.
    """
    model, free, candidates = selection.model, set(selection.layers), list[tuple[str, Kind]]()
    kinds = [kind.protecting(protected, probe.constant) for kind in kinds_of(chosen)]
    if kinds and probe.outputs is None:
        raise ValueError(f"{chosen} are found by running the network: give calibration data or input_shape")
    for owner, module in reversed(list(model.named_modules())):  # inner modules take their layers first
        for kind in kinds if owner else ():
            within = any(layer.startswith(f"{owner}.") for layer in selection.layers)
            if within and (names := kind.layers_of(owner, module)) is not None and free.issuperset(names):
                candidates.append((owner, kind))
                free.difference_update(names)
    found = [kind.find(model, owner, probe.calls.get(owner)) for owner, kind in reversed(candidates)]
    if any(each.changes for each in found) and not _are_separate(model, found, probe):
        found = [each if _are_separate(model, [each], probe) else each.without_parts(USED_ELSEWHERE) for each in found]
    reasons = {layer: reason for each in found for layer, reason in each.reasons.items()}
    parts = [part for each in found for part in each.parts]
    taken = {layer for part in parts for layer in part.layers}
    if chosen != "tokens":
        parts += [LayerPart.of(name, layer) for name, layer in selection.layers.items() if name not in taken]
    place = {name: number for number, (name, _) in enumerate(model.named_modules())}
    parts.sort(key=lambda part: place[(*part.layers, part.owner)[0]])
    parts = [part.with_rows(selection.rows).in_form(form) for part in parts]
    parts = linked(model, parts, kinds, reasons)
    if chosen == "tokens" and not parts:
        why = next((f"{name}: {reason}" for name, reason in reasons.items()), "it has no list of blocks with attention")
        raise ValueError(f"no tokens of this {type(model).__name__} can be merged ({why}): choose other parts")
    return {part.name: part for part in parts}, reasons


@torch.no_grad()
def _are_separate(model: nn.Module, found: Iterable[Found], probe: Probe) -> bool:
    """Whether the whole network computes the same, as far as its precision goes, after each of two changes."""
    device, types = next(model.parameters()).device, (probe.precision, type_of(model))
    rounded = max(types, key=lambda each: torch.finfo(each).eps)  # outputs may be of a finer type
    outputs = []
    for side in (0, 1):
        network = stand_in(model)
        try:
            for each in found:
                for change in each.changes[side : side + 1]:
                    change(network.get_submodule(each.within))
            with evaluating(network), autocast(device, probe.precision):
                leaves = tree_leaves(run(network, probe.sample))
            tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())
            outputs.append([tensor.to(rounded) for tensor in tensors])
        except Exception:  # from anyone's code
            return False
    return are_close(outputs[0], outputs[1], digits=0.6)


def linked(model: nn.Module, parts: list[Part], kinds: Iterable[Kind], reasons: dict[str, str]) -> list[Part]:
    """Relate parts of these kinds to each other."""
    for kind in kinds:
        parts = kind.linked(model, parts, reasons)
    return parts


def kinds_of(chosen: str) -> list[Kind]:
    """The kinds with names such as `units,tokens`. Raises `ValueError` for other names."""
    names = chosen.split(",")
    if wrong := ", ".join(repr(name) for name in names if name not in KINDS):
        raise ValueError(f"parts must be one of {', '.join(KINDS)}, or several, got {wrong}")
    return [kind for name in names for kind in KINDS[name]]


def results_of(chosen: str) -> int:
    """The version of what is computed with the `chosen` kinds; those that are not known here have none."""
    return RESULTS + sum(kind.results for name in chosen.split(",") for kind in KINDS.get(name, ()))


def part_at(model: nn.Module, name: str, chosen: str, described: Mapping[str, Description] = {}) -> Part | None:
    """The part of the `chosen` kinds with a name, or the layer, without running the network; None if there is none."""
    part = next(filter(None, (kind.at(model, name) for kind in kinds_of(chosen))), None)
    if part is None and isinstance(layer := module_at(model, name), nn.Linear):
        part = LayerPart.of(name, layer)
    return replace(part, **vars(described[name])) if part and name in described else part


def rewritten(model: nn.Module, parts: Mapping[str, Part]) -> nn.Module:
    """Make a network that computes the same by calling the linears of all parts; it shares all other weights.

    It is the network itself if it calls them already.
    """
    if all(module_at(model, linear) for part in parts.values() for linear in part.linears):
        return model
    network = copy_with(model, {tensor: tensor for tensor in (*model.parameters(), *model.buffers())})
    for part in parts.values():
        part.rewrite(network, parts.keys())
    return network


def put(
    model: nn.Module, parts: Mapping[str, Part], plan: Plan, weights: Mapping[str, Decomposition] | None = None
) -> None:
    """Give parts of a network their ranks in the plan, with these decompositions or empty."""
    chosen = [(parts[name], rank) for name, rank in plan.items() if rank is not None]
    # Units read plain layers; tokens are merged around layers that stay.
    for part, rank in sorted(chosen, key=lambda each: (each[0].shortens, not each[0].is_unit)):
        part.put(model, rank, weights)


def apply(model: nn.Module, parts: Mapping[str, Part], plan: Plan, weights: Mapping[str, Decomposition]) -> nn.Module:
    """Copy a network with its parts at their ranks; a 1x1 convolution that stays dense is a convolution again."""
    compressed = copy_with(model)
    put(compressed, parts, plan, weights)
    return with_convolutions_restored(compressed)


def emptied(
    dense: nn.Module, chosen: str, plan: Plan, layouts: Mapping[str, Layout], described: Mapping[str, Description] = {}
) -> nn.Module:
    """Change parts of the `chosen` kinds as a plan says, with empty weights; low-rank layers in `layouts` are pivoted.

    `described` are the `descriptions` of the network that was compressed. Raises `ValueError` for a part that it does
    not have, and for a rank that the part cannot have.
    """
    misfit = f"the plan does not fit this {type(dense).__name__}, load the network that was compressed"
    model = with_convolutions(dense, chosen, plan)
    parts = {name: part for name in plan if (part := part_at(model, name, chosen, described))}
    within = {layer for part in parts.values() if part.is_unit for layer in part.layers}
    for name, rank in plan.items():
        if name not in parts or name in within:
            fault = "is missing, or no part to compress" if name not in parts else "is in another part of the plan"
        elif rank is not None and not parts[name].least <= rank <= parts[name].largest:
            fault = f"has ranks up to {parts[name].largest}, not {rank}"
        else:
            continue
        raise ValueError(f"{misfit}: {name!r} {fault}")
    forms = {name: Pivoted(layout=layouts[name]) if name in layouts else PLAIN for name in parts}
    try:
        put(model, {name: part.in_form(forms[name]) for name, part in parts.items()}, plan)
    except AttributeError as error:  # a description names modules that are not there
        raise ValueError(f"{misfit}: {error}") from error
    return with_convolutions_restored(model)


def descriptions(model: nn.Module) -> dict[str, Description]:
    """Fields of a network's parts that `emptied` needs beside the plan, by part."""
    return {
        name: fields for kinds in KINDS.values() for kind in kinds for name, fields in kind.described(model).items()
    }


def with_convolutions(dense: nn.Module, chosen: str, names: Iterable[str]) -> nn.Module:
    """Rewrite a network to call linear layers, and its 1x1 convolutions too if parts of these names need them."""
    model = with_linear_layers(dense)
    if all(part_at(model, name, chosen) for name in names):
        return model
    return with_linear_layers(model, [name for name, module in model.named_modules() if is_pointwise(module)])


def with_convolutions_restored(model: nn.Module) -> nn.Module:
    """Turn 1x1 convolutions that call dense layers into convolutions again, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, PointwiseConvolution) and isinstance(module.linear, nn.Linear):
            replace_submodule(model, name, module.convolution())
    return model
