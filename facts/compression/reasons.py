"""Reasons to leave a layer alone, as far as its weights and its name show."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facts.modules.networks import heads_of
from facts.modules.pointwise import is_pointwise

EXCLUDED_NAMES = ("norm", "head", "patch_embed", "downsample", "classifier")
MIN_OUT_FEATURES = 10
MAKES_OUTPUTS = "it makes the outputs"


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def pointwise_convolutions(model: nn.Module) -> dict[str, nn.Conv2d]:
    """The model's 1x1 convolutions, which can be compressed like linear layers."""
    return {name: module for name, module in model.named_modules() if is_pointwise(module)}


def reasons_to_skip(model: nn.Module, excluded_names: Iterable[str] = EXCLUDED_NAMES) -> dict[str, str]:
    """Reasons to leave linear layers and 1x1 convolutions alone unless they are named.

    They make the outputs, are small, have a name that holds an excluded one (by default those that the paper leaves
    out, section 5.1), share their weight, or compute more than a product with it.
    """
    heads = heads_of(model)
    users: dict[Tensor, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        if isinstance(weight := getattr(module, "weight", None), nn.Parameter):
            users[weight].append(name)
    reasons = {}
    for name, layer in (linear_layers(model) | pointwise_convolutions(model)).items():
        excluded = [part for part in excluded_names if part in name.replace("multihead", "")]
        others = [user for user in users.get(layer.weight, ()) if user != name]
        if layer in heads:
            reasons[name] = MAKES_OUTPUTS
        elif excluded:
            reasons[name] = f"its name holds `{excluded[0]}`"
        elif len(layer.weight) < MIN_OUT_FEATURES:
            reasons[name] = f"it has fewer than {MIN_OUT_FEATURES} outputs"
        elif others:
            reasons[name] = f"it shares its weight with {others[0]}"
        elif isinstance(layer, nn.Linear) and not _is_plain(layer):
            reasons[name] = f"it is a {type(layer).__name__}, which computes in a way of its own"
    return reasons


def _is_plain(layer: nn.Linear) -> bool:
    """Check, if the layer has values, that its own `forward` computes what a linear layer computes."""
    if type(layer).forward is nn.Linear.forward or layer.weight.is_meta:
        return True
    vector = torch.linspace(-1, 1, layer.in_features).to(layer.weight)
    with torch.no_grad():
        return torch.equal(layer(vector), F.linear(vector, layer.weight, layer.bias))
