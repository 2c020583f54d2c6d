"""Other ways to make a network's layers cheaper, timed beside low-rank ones. Their weights are meaningless."""

import copy
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from facts.modules.forms import FORMS
from facts.modules.lowrank import LowRankLayer, LowRankLinear

RESIDUAL_SHARE = 0.05  # of the layer's parameters (MemViT, as the paper's supplement reads it)


class WithResidual(nn.Module):
    """A low-rank layer with a smaller one beside it, whose outputs are added (Azizi et al., 2024)."""

    def __init__(self, main: LowRankLayer, rank: int):
        super().__init__()
        self.main = main
        weight = next(main.parameters())
        left, right = weight.new_ones(main.out_features, rank), weight.new_ones(rank, main.in_features)
        self.residual = LowRankLinear(left, right)

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x) + self.residual(x)


def with_residuals(model: nn.Module, compressed: nn.Module, layers: Iterable[str]) -> nn.Module:
    """The compressed network with a residual of 5 % of the original's parameters beside each low-rank layer."""
    network = copy.deepcopy(compressed)
    for name in layers:
        layer = network.get_submodule(name)
        if isinstance(layer, LowRankLayer):
            rank = FORMS["plain"].rank_of_ratio(layer.out_features, layer.in_features, RESIDUAL_SHARE)
            network.set_submodule(name, WithResidual(layer, rank))
    return network


def in_half(model: nn.Module, compressed: nn.Module, layers: Iterable[str]) -> nn.Module:
    """The original network in half precision."""
    return copy.deepcopy(model).half()


def two_of_four(model: nn.Module, compressed: nn.Module, layers: Iterable[str]) -> nn.Module:
    """Remove the two smallest of every four weights in a row, in half precision, in the GPU's own format.

    Raises `NotImplementedError` if the device has no such format.
    """
    weight = next(model.parameters())
    if weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device) < (8, 0):
        raise NotImplementedError("2:4 sparsity needs an NVIDIA GPU of compute capability 8.0 or newer")
    network = in_half(model, compressed, layers)
    for name in layers:
        layer = network.get_submodule(name)
        groups = layer.weight.detach().unflatten(1, (-1, 4))
        keep = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, groups.abs().topk(2).indices, True)
        sparse = torch.sparse.to_sparse_semi_structured((groups * keep).flatten(1))
        layer.weight = nn.Parameter(sparse, requires_grad=False)
    return network


Variant = Literal["residual", "half", "two_of_four"]
VARIANTS: dict[Variant, Callable[[nn.Module, nn.Module, Iterable[str]], nn.Module]] = {
    "residual": with_residuals,
    "half": in_half,
    "two_of_four": two_of_four,
}
