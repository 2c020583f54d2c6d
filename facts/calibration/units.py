"""The parts of a network: its layers, or its units, found by names and sizes and checked by what they compute."""

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from facts.calibration.selection import Selection
from facts.cost.trace import first_sample, has_row_per_sample
from facts.decomposition.parts import HiddenUnit, LayerPart, OutputUnit, Part, PartsName, ScoreUnit, Unit
from facts.modules.heads import Heads, Roles, call_cores, linear_of, put_heads
from facts.modules.hidden import HiddenRoles, keep_hidden
from facts.modules.linear_calls import copy_with
from facts.modules.lowrank import LinearLayer
from facts.modules.modes import evaluating
from facts.modules.networks import run
from facts.utils.batches import to_device

SAME = 1e-5  # relative error in float64 of code that rounds to float32 in between

NO_PRODUCTS = "attention that computes more than products of its layers, such as a rotation or a norm"
NOT_SEPARATE = "hidden units that cannot be left out one by one"


@dataclass(frozen=True)
class Parts:
    """The parts of a network, and `reasons` why some layers are in no unit.

    `network` computes the same by calling linear layers; it shares all weights except attention's.
    """

    network: nn.Module
    parts: dict[str, Part]
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def calls(self) -> dict[str, LinearLayer]:
        """The linear layers that the network calls."""
        return {call: self.network.get_submodule(call) for part in self.parts.values() for call in part.calls}  # type: ignore[misc]


def parts_of(selection: Selection, parts: PartsName, inputs: Any) -> Parts:
    """Turn the selected layers into parts, as layers or as units, which are checked on `inputs`.

    Raises `ValueError` for units without inputs.
    """
    if parts == "layers":
        layers = selection.layers.items()
        return Parts(selection.model, {name: LayerPart.of(name, layer, selection.rows[name]) for name, layer in layers})
    if inputs is None:
        raise ValueError("units are found by running the network: give calibration data or input_shape")
    return with_units(selection, _kinds_of(selection.model, _candidates(selection), inputs))


def with_units(selection: Selection, kinds: Mapping[str, str]) -> Parts:
    """Turn the selected layers into units of known `kinds`, by the modules that hold them; other layers stay layers."""
    model, taken, reasons = selection.model, dict[str, Mapping[str, Part]](), dict[str, str]()
    network = copy_with(model, {tensor: tensor for tensor in (*model.parameters(), *model.buffers())})
    for owner, roles in _candidates(selection).items():
        paths, kind = _paths(model, owner, roles), kinds.get(owner)
        if kind is None:
            reasons |= dict.fromkeys(paths, NO_PRODUCTS if isinstance(roles, Roles) else NOT_SEPARATE)
        elif isinstance(roles, HiddenRoles):
            down = f"{owner}.{roles.down}"
            width = selection.layers[down].in_features
            size = sum(selection.layers[each].weight.numel() for each in paths)
            unit = {owner: HiddenUnit((down,), selection.rows[down], size, owner, width, width)}
            taken |= dict.fromkeys(paths, unit)
        else:
            call_cores(network.get_submodule(owner), roles, kind)
            if kind == "outputs":
                reasons |= dict.fromkeys(paths[:2], NO_PRODUCTS)
                paths = paths[2:]
            taken |= dict.fromkeys(paths, _attention_units(selection, owner, roles, kind))
    found: dict[str, Part] = {}
    for name, layer in selection.layers.items():
        if name in taken:
            found |= taken[name]
        else:
            found[name] = LayerPart.of(name, layer, selection.rows[name])
    return Parts(network, found, reasons)


def _candidates(selection: Selection) -> dict[str, Roles | HiddenRoles]:
    """Find modules that look like attention or an MLP and whose layers are all selected."""
    found: dict[str, Roles | HiddenRoles] = {}
    free = set(selection.layers)
    for owner, module in reversed(list(selection.model.named_modules())):  # inner modules take their layers first
        roles = Roles.of(module) or HiddenRoles.of(module)
        if owner and roles and free >= (paths := set(_paths(selection.model, owner, roles))):
            found[owner] = roles
            free -= paths
    return dict(reversed(found.items()))


def _paths(model: nn.Module, owner: str, roles: Roles | HiddenRoles) -> list[str]:
    """Names of the linear layers of a module that looks like attention or an MLP."""
    return [f"{owner}.{name}" for name in roles.layers(model.get_submodule(owner))]


def _attention_units(selection: Selection, owner: str, roles: Roles, kind: str) -> dict[str, Unit]:
    """Make units of both products of all heads, or only of the outputs' product."""
    heads = Heads.of(selection.model.get_submodule(owner), roles)
    first, last = f"{owner}.{roles.inputs[0]}", f"{owner}.{roles.output}"
    rows = selection.rows[_paths(selection.model, owner, roles)[-1]]
    scores, outputs = (tuple(f"{path}.heads.{group}" for group in range(roles.num_groups)) for path in (first, last))
    units: dict[str, Unit] = {}
    if kind == "products":
        size, width = heads.queries.numel() + heads.keys.numel(), heads.score_width
        units[f"{owner}.scores"] = ScoreUnit(scores, rows, size, owner, width, width)
    size, width = heads.values.numel() + heads.outputs.numel(), heads.output_width
    units[f"{owner}.outputs"] = OutputUnit(outputs, rows, size, owner, width, width, alone=kind == "outputs")
    return units


FEATURES = {
    "products": ("queries", "keys", "values", "query_bias", "key_bias", "value_bias"),
    "outputs": ("values", "value_bias"),
}


def _kinds(roles: Roles | HiddenRoles) -> list[str]:
    """The kinds of units that a module may hold, the best kind first."""
    if isinstance(roles, HiddenRoles):
        return ["hidden"]
    return ["products"] * (roles.num_groups == roles.num_heads) + ["outputs"] * (len(roles.inputs) == 3)


def _leave_out_half(module: nn.Module, roles: Roles | HiddenRoles, kind: str) -> None:
    """Keep every other feature of a unit, which fails in code that takes their number from its inputs."""
    if isinstance(roles, HiddenRoles):
        down = linear_of(module.get_submodule(roles.down))
        kept = torch.arange(0, down.in_features, 2, device=down.weight.device)
        keep_hidden(module, roles, kept, down.weight[:, kept], down.bias)
        return
    heads = Heads.of(module, roles)
    kept_features = {name: each[:, ::2] for name in FEATURES[kind] if (each := getattr(heads, name)) is not None}
    put_heads(module, roles, replace(heads, **kept_features, outputs=heads.outputs[..., ::2]))


def _ignore_half(module: nn.Module, roles: Roles | HiddenRoles, kind: str) -> None:
    """Put zeros in place of every other feature of a unit, and let attention call linear layers."""
    if isinstance(roles, HiddenRoles):
        linear_of(module.get_submodule(roles.down)).weight[:, 1::2] = 0
        return
    heads = Heads.of(module, roles)
    for name in FEATURES[kind]:
        if (each := getattr(heads, name)) is not None:
            each[:, 1::2] = 0  # a view of the module's weights
    call_cores(module, roles, kind)


def _kinds_of(model: nn.Module, candidates: Mapping[str, Roles | HiddenRoles], inputs: Any) -> dict[str, str]:
    """Find the kind of units in each module that holds some, by its outputs in float64 for one sample of the inputs."""
    given: dict[str, tuple] = {}
    sample = first_sample(inputs) if has_row_per_sample(inputs) else inputs

    def note(name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given.setdefault(name, (args, kwargs))

    with ExitStack() as stack, torch.no_grad(), evaluating(model):
        for name in candidates:
            hook = model.get_submodule(name).register_forward_pre_hook(partial(note, name), with_kwargs=True)
            stack.callback(hook.remove)
        run(model, to_device(sample, next(model.parameters()).device))
    found = {}
    for name, call in given.items():
        module, roles = model.get_submodule(name), candidates[name]
        if kind := next((kind for kind in _kinds(roles) if _holds_unit(module, roles, kind, *call)), None):
            found[name] = kind
    return found


@torch.no_grad()
def _holds_unit(module: nn.Module, roles: Roles | HiddenRoles, kind: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a module computes the same if half of a unit is left out as if it is ignored."""
    args, kwargs = tree_map_only(
        Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, (args, kwargs)
    )
    outputs = []
    for change in (_leave_out_half, _ignore_half):
        changed = copy.deepcopy(module).double().eval()
        try:
            change(changed, roles, kind)
            leaves = tree_leaves(changed(*args, **kwargs))
            outputs.append(next(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        except Exception:  # from anyone's code
            return False
    first, second = outputs
    return bool(torch.linalg.vector_norm(first - second) <= SAME * torch.linalg.vector_norm(first))
