"""Reasons to leave a layer alone, as far as its weight and its name show them."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from facts.modules.modes import evaluating
from facts.modules.networks import heads_of
from facts.modules.pointwise import is_pointwise

EXCLUDED_NAMES = ("norm", "head", "patch_embed", "downsample", "classifier")
MIN_OUT_FEATURES = 10
MAKES_OUTPUTS = "it is the output layer"
PARAMETRIZED = "its weight is parametrized; remove_parametrizations of torch.nn.utils.parametrize makes it a plain one"


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def pointwise_convolutions(model: nn.Module) -> dict[str, nn.Conv2d]:
    """The model's 1x1 convolutions, which can be compressed like linear layers."""
    return {name: module for name, module in model.named_modules() if is_pointwise(module)}


def reasons_to_skip(model: nn.Module, excluded_names: Iterable[str] = EXCLUDED_NAMES) -> dict[str, str]:
    """Reasons to leave linear layers and 1x1 convolutions alone unless they are named.

    They make the outputs, are small, have a name that contains an excluded one (default: those that the paper leaves
    out, section 5.1), share their weight, or compute more than a product with it.
    """
    heads, shared = heads_of(model), reasons_shared(model)
    reasons = {}
    for name, layer in (linear_layers(model) | pointwise_convolutions(model)).items():
        excluded = [part for part in excluded_names if part in name.replace("multihead", "")]
        if layer in heads:
            reasons[name] = MAKES_OUTPUTS
        elif excluded:
            reasons[name] = f"its name holds `{excluded[0]}`"
        elif is_parametrized(layer):  # reading its weight may change its state
            reasons[name] = PARAMETRIZED
        elif len(layer.weight) < MIN_OUT_FEATURES:
            reasons[name] = f"it has fewer than {MIN_OUT_FEATURES} outputs"
        elif name in shared:
            reasons[name] = shared[name]
        elif reason := reason_not_plain(layer):
            reasons[name] = reason
    return reasons


def reasons_shared(model: nn.Module) -> dict[str, str]:
    """Reasons for modules that share their weight: replacing one would remove no weight, and untie the modules."""
    users: dict[Tensor, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        if not is_parametrized(module) and isinstance(weight := getattr(module, "weight", None), nn.Parameter):
            users[weight].append(name)
    shared = [names for names in users.values() if len(names) > 1]
    return {name: f"it shares its weight with {names[name == names[0]]}" for names in shared for name in names}


def reason_not_plain(layer: nn.Linear | nn.Conv2d) -> str | None:
    """Say why replacing a layer would lose more than its weight, as far as a call with one vector shows, or None."""
    if is_parametrized(layer):
        return PARAMETRIZED
    kind: type[nn.Module] = nn.Linear if isinstance(layer, nn.Linear) else nn.Conv2d
    of_class = type(layer).forward is not kind.forward
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    if layer.weight.is_meta or not (of_class or "forward" in vars(layer) or hooked):
        return None
    inputs = torch.linspace(-1, 1, layer.weight.shape[1]).to(layer.weight)[None]
    if kind is nn.Conv2d:
        inputs = inputs[..., None, None]
    with torch.no_grad(), evaluating(layer):
        expected = kind.forward(layer, inputs)
        try:
            outputs = layer(inputs)
        except Exception:  # from hooks, which are anyone's code
            outputs = None
    if isinstance(outputs, Tensor) and torch.equal(outputs, expected):
        return None
    if of_class:
        return f"it is a {type(layer).__name__}, which has its own way of computing"
    return "a hook, or a `forward` of its own, changes what it computes"
