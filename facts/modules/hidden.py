"""Hidden units of an MLP: the linear layers that compute and read them, and how to keep only some of them."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from facts.modules.lowrank import linear_layer, own_parameter


@dataclass(frozen=True)
class HiddenRoles:
    """Names of the layers that compute hidden units (`ups`; two if gated) and of the one that reads them (`down`).

    If `packed`, one layer computes both halves of gated units: unit i is its rows i and i + n.
    """

    ups: tuple[str, ...]
    down: str
    packed: bool

    @classmethod
    def of(cls, mlp: nn.Module) -> Self | None:
        """Find the layers by size, among a module's children or else all descendants; the last one is `down`.

        Returns None if the layers do not fit together.
        """
        layers = {name: child for name, child in mlp.named_children() if isinstance(child, nn.Linear)}
        if len(layers) < 2:
            layers = {name: module for name, module in mlp.named_modules() if isinstance(module, nn.Linear)}
        *ups, down = layers or [""]
        made = [layers[name].out_features for name in ups]
        if not ups or len(ups) > 2:
            return None
        size = layers[down].in_features
        return cls(tuple(ups), down, made != [size] * len(ups)) if made in ([size], [size] * 2, [2 * size]) else None

    def layers(self, mlp: nn.Module) -> list[str]:
        return [*self.ups, self.down]


def keep_hidden(mlp: nn.Module, roles: HiddenRoles, kept: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Keep the hidden units with indices `kept [w]`, read by a new `weight [m, w]` and `bias [m]`."""
    size = mlp.get_submodule(roles.down).in_features
    rows = torch.cat([kept, kept + size]) if roles.packed else kept
    for name in roles.ups:
        up = mlp.get_submodule(name)
        mlp.set_submodule(name, _like(up, up.weight[rows], None if up.bias is None else up.bias[rows]))
    mlp.set_submodule(roles.down, _like(mlp.get_submodule(roles.down), weight, bias))


def empty_hidden(mlp: nn.Module, roles: HiddenRoles, width: int) -> None:
    """Keep `width` hidden units, with meaningless weights."""
    down = mlp.get_submodule(roles.down)
    weight = down.weight.new_zeros(down.out_features, width)
    keep_hidden(mlp, roles, torch.arange(width, device=weight.device), weight, down.bias)


def _like(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Make a linear layer with copies of these values, in the type of `layer` and trainable if it is."""
    assert isinstance(layer, nn.Linear)
    new = linear_layer(
        own_parameter(weight.to(layer.weight)), None if bias is None else own_parameter(bias.to(layer.weight))
    )
    return new.requires_grad_(layer.weight.requires_grad)
