"""Low-rank linear layers, and dense ones made from existing weights."""

from abc import ABC, abstractmethod
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LowRankLayer(nn.Module, ABC):
    """A linear layer of rank k, stored as two smaller matrices: a drop-in replacement for `nn.Linear`.

    It takes any leading shape; `.weight` is the product.
    """

    in_features: int
    out_features: int
    rank: int
    bias: nn.Parameter | None

    @abstractmethod
    def factors(self) -> tuple[Tensor, Tensor]:
        """The weight as a product, `left [d_out, k]` and `right [k, d_in]`."""

    @property
    def num_weights(self) -> int:
        """Multiply-accumulates for one vector."""
        return sum(factor.numel() for factor in self.factors())

    @property
    def weight(self) -> Tensor:
        left, right = self.factors()
        return left @ right

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}, bias={bias}"


class LowRankLinear(LowRankLayer):
    """`x @ rightᵀ @ leftᵀ + bias` with `left [d_out, k]` and `right [k, d_in]`: k (d_out + d_in) weights."""

    def __init__(self, left: Tensor, right: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.rank = left.shape[-2:]
        self.in_features = right.shape[1]
        self.left, self.right = own_parameter(left), own_parameter(right)
        self.bias = None if bias is None else own_parameter(bias)

    def factors(self) -> tuple[Tensor, Tensor]:
        return self.left, self.right

    def forward(self, x: Tensor) -> Tensor:
        return linear(F.linear(x, self.right), self.left, self.bias)


class LayersOfHeads(nn.ModuleList):
    """Linear layers within H heads, `[..., H, n]` to `[..., H, m]`: one for each head, or for each group of heads."""

    def __init__(self, layers: list[LowRankLayer], num_heads: int):
        super().__init__(layers)
        self.in_features, self.num_heads = layers[0].in_features, num_heads

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-2, (len(self), -1)).unbind(-3)
        return torch.cat([layer(group) for layer, group in zip(self, groups, strict=True)], dim=-2)

    def at_once(self, x: Tensor) -> Tensor:
        """Compute the same without calling the layers."""
        factors = zip(*(layer.factors() for layer in self), strict=True)
        left, right = (torch.stack(each) for each in factors)
        weights = torch.einsum("g...mr,grn->g...mn", left, right).flatten(0, -3)
        outputs = torch.einsum("...hn,hmn->...hm", x, weights)
        return outputs if self[0].bias is None else outputs + torch.stack([layer.bias for layer in self]).to(outputs)


LinearLayer = nn.Linear | LowRankLayer
Layer = TypeVar("Layer", nn.Linear, LowRankLayer)


def linear_layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Make a layer that shares the memory of `weight [d_out, d_in]` and `bias [d_out]`."""
    d_out, d_in = weight.shape
    layer = nn.Linear(d_in, d_out, bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), bias.requires_grad)
    return layer


def linear_like(weight: Tensor, bias: Tensor | None, original: nn.Module) -> nn.Linear:
    """Make a layer with copies of these values, in the type of the `original`, and trainable where it is."""
    assert isinstance(original, nn.Linear)
    weight = own_parameter(weight.to(original.weight))
    return trained_like(linear_layer(weight, None if bias is None else own_parameter(bias.to(weight))), original)


def own_parameter(tensor: Tensor) -> nn.Parameter:
    """Copy the values to a contiguous parameter, as files store them: outputs' last bits depend on the layout."""
    return nn.Parameter(tensor.detach().clone(memory_format=torch.contiguous_format))


def trained_like(layer: Layer, original: nn.Linear) -> Layer:
    """Let the values of a layer be trained if the original's are; without a bias there, its bias goes by the weight."""
    layer.requires_grad_(original.weight.requires_grad)
    if layer.bias is not None and original.bias is not None:
        layer.bias.requires_grad_(original.bias.requires_grad)
    return layer


@torch.fx.wrap  # a symbolic trace has no device
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `F.linear`; on a CPU the bias is added afterwards, which is faster than starting from copies of it."""
    if bias is None or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    return F.linear(x, weight).add_(bias)
