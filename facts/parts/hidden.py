"""Hidden units of an MLP: found by sizes, eliminated one by one, read by a layer with new weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from facts.cost.probe import Call
from facts.decomposition.elimination import eliminate_together, undone
from facts.decomposition.truncation import Decomposition
from facts.modules.linear_calls import replace_submodule
from facts.modules.lowrank import LinearLayer, linear_like, own_parameter
from facts.parts.base import NOT_CALLED, Found, Kind, Part, Problem, Unit, computes_the_same, module_at

MATRICES = 16  # [n, n] in float64, at most, that an elimination holds for each MLP
NOT_SEPARATE = "hidden units that cannot be left out one by one"


@dataclass(frozen=True)
class Roles:
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


@dataclass(frozen=True)
class HiddenUnit(Unit):
    """The hidden units of an MLP; its only linear is the layer that reads them."""

    def num_together(self, linear: nn.Module) -> int:
        """On a GPU, as many as fit: all take a step in the time of one."""
        device = next(linear.parameters()).device
        if device.type != "cuda":
            return 1
        return max(1, torch.cuda.mem_get_info(device)[0] // (MATRICES * torch.float64.itemsize * self.width**2))

    def decompose_together(self, problems: Sequence[Problem]) -> list[Decomposition]:
        return eliminate_together([(linear.weight.detach(), *rest) for linear, *rest in problems])

    def put(self, model: nn.Module, rank: int, weights: Mapping[str, Decomposition] | None = None) -> None:
        mlp = model.get_submodule(self.owner)
        roles = Roles.of(mlp)
        assert roles
        down = mlp.get_submodule(roles.down)
        assert isinstance(down, nn.Linear)
        if weights is None:
            kept = torch.arange(rank, device=down.weight.device)
            keep_hidden(mlp, roles, kept, down.weight.new_zeros(down.out_features, rank), down.bias)
            return
        decomposition = weights[self.linears[0]]
        assert decomposition.order is not None
        left, right = (factor.to(down.weight.device).double() for factor in decomposition.truncate(rank))
        kept = decomposition.order[:rank].to(down.weight.device).sort().values
        keep_hidden(mlp, roles, kept, left @ right[:, kept], decomposition.bias(down, rank))

    def loads_without_facts(self) -> bool:
        return True

    def stored(self, decomposition: Decomposition) -> dict[str, Tensor]:
        """Store only the triangle of the right factor; with the weight, it gives the left one."""
        triangle = decomposition.right[:, decomposition.order]
        tensors = super().stored(decomposition) | {"right": triangle[_below(len(triangle))]}
        del tensors["left"]
        return tensors

    def stored_shapes(self, linear: LinearLayer) -> dict[str, tuple[int, ...]]:
        n = self.width
        return {"right": (n * (n - 1) // 2,), "order": (n,), "energies": (n,), "num_repaired": ()}

    def restored(self, linear: LinearLayer, tensors: Mapping[str, Tensor]) -> Decomposition:
        order, values = tensors["order"], tensors["right"]
        if not order.sort().values.equal(torch.arange(self.width, device=order.device)):
            raise ValueError("its order is not a permutation")
        triangle = torch.eye(self.width, dtype=values.dtype, device=values.device)
        triangle[_below(self.width)] = values
        right = torch.zeros_like(triangle)
        right[:, order] = triangle
        whole = {**tensors, "right": right, "left": undone(linear.weight.detach(), right, order)}
        return super().restored(linear, whole)


class Hidden(Kind):
    """Modules whose linear layers compute hidden units and read them."""

    def layers_of(self, owner: str, module: nn.Module) -> list[str] | None:
        roles = Roles.of(module)
        return None if roles is None else [f"{owner}.{name}" for name in (*roles.ups, roles.down)]

    def find(self, model: nn.Module, owner: str, call: Call | None) -> Found:
        unit, mlp = self.at(model, owner), model.get_submodule(owner)
        roles = Roles.of(mlp)
        assert unit and roles
        changes = partial(_leave_out_half, roles), partial(_ignore_half, roles)
        if computes_the_same(mlp, call, *changes):
            return Found((unit,), {}, changes, owner)
        return Found(reasons=dict.fromkeys(unit.layers, NOT_SEPARATE if call else NOT_CALLED))

    def at(self, model: nn.Module, name: str) -> Part | None:
        mlp = module_at(model, name)
        roles = None if mlp is None else Roles.of(mlp)  # a module may have a length of 0
        if mlp is None or roles is None:
            return None
        layers = {f"{name}.{each}": mlp.get_submodule(each) for each in (*roles.ups, roles.down)}
        size, (*_, down) = sum(each.weight.numel() for each in layers.values()), layers
        width = layers[down].in_features
        return HiddenUnit(name, name, tuple(layers), (down,), size, width=width)


def _leave_out_half(roles: Roles, mlp: nn.Module) -> None:
    """Keep every other hidden unit, which fails in code that takes their number from its inputs."""
    down = mlp.get_submodule(roles.down)
    kept = torch.arange(0, down.in_features, 2, device=down.weight.device)
    keep_hidden(mlp, roles, kept, down.weight[:, kept], down.bias)


def _ignore_half(roles: Roles, mlp: nn.Module) -> None:
    down = mlp.get_submodule(roles.down)
    down.weight = own_parameter(down.weight)  # copies of the network share it
    down.weight[:, 1::2] = 0


def keep_hidden(mlp: nn.Module, roles: Roles, kept: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Keep the hidden units with indices `kept [w]`, read by a new `weight [m, w]` and `bias [m]`."""
    size = mlp.get_submodule(roles.down).in_features
    rows = torch.cat([kept, kept + size]) if roles.packed else kept
    for name in roles.ups:
        up = mlp.get_submodule(name)
        replace_submodule(mlp, name, linear_like(up.weight[rows], None if up.bias is None else up.bias[rows], up))
    replace_submodule(mlp, roles.down, linear_like(weight, bias, mlp.get_submodule(roles.down)))


def _below(size: int) -> Tensor:
    """Mask `[size, size]` of the values below the diagonal."""
    return torch.ones(size, size, dtype=torch.bool).tril(-1)
