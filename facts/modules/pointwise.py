"""1x1 convolutions as linear layers on pixels."""

from typing import Any

from torch import Tensor, nn

from facts.modules.lowrank import LowRankLayer, linear_layer


class PointwiseConvolution(nn.Module):
    """A 1x1 convolution of images `[N, d_in, H, W]`, computed by a `linear` layer that shares its weights."""

    def __init__(self, convolution: nn.Conv2d):
        super().__init__()
        self.stride: Any = convolution.stride
        self.linear: nn.Linear | LowRankLayer = linear_layer(convolution.weight.flatten(1), convolution.bias)

    def forward(self, images: Tensor) -> Tensor:
        rows, columns = self.stride
        outputs = self.linear(images[..., ::rows, ::columns].movedim(-3, -1)).movedim(-1, -3)
        return outputs.contiguous() if images.is_contiguous() else outputs  # in a convolution's memory layout

    def convolution(self) -> nn.Conv2d:
        """Convert back to a convolution, with the layer's current weights."""
        layer = self.linear
        result = nn.Conv2d(layer.in_features, layer.out_features, 1, self.stride, bias=False, device="meta")
        result.weight = nn.Parameter(layer.weight.detach()[..., None, None], layer.weight.requires_grad)
        result.bias = layer.bias
        return result.train(self.training)


def is_pointwise(module: nn.Module) -> bool:
    """Check for a convolution that only mixes channels: 1x1, not grouped, not padded."""
    return (
        type(module) is nn.Conv2d
        and module.kernel_size == (1, 1)
        and module.groups == 1
        and module.padding in ((0, 0), "valid", "same")
        and module.in_channels > 1
    )
