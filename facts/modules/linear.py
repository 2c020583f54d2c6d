"""Linear layers made from existing weights."""

from torch import Tensor, nn


def linear_layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A layer that shares the memory of `weight [d_out, d_in]` and `bias [d_out]`."""
    d_out, d_in = weight.shape
    layer = nn.Linear(d_in, d_out, bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), bias.requires_grad)
    return layer
