"""1x1 convolutions as the linear layers that they are, token by token."""

from torch import Tensor, nn

from facts.lowrank import LowRankLinear


class PointwiseConvolution(nn.Module):
    """What a 1x1 convolution computes of images `[N, d_in, H, W]`, by a `linear` layer that sees `[N, H, W, d_in]`.

    The layer shares the convolution's weights; it may be replaced by a low-rank one.
    """

    def __init__(self, convolution: nn.Conv2d):
        super().__init__()
        self.stride = convolution.stride
        self.linear: nn.Linear | LowRankLinear = nn.Linear(1, 1, device="meta")
        self.linear.in_features, self.linear.out_features = convolution.in_channels, convolution.out_channels
        self.linear.weight = nn.Parameter(convolution.weight.detach().flatten(1), convolution.weight.requires_grad)
        self.linear.bias = convolution.bias

    def forward(self, images: Tensor) -> Tensor:
        rows, columns = self.stride
        return self.linear(images[..., ::rows, ::columns].movedim(-3, -1)).movedim(-1, -3)

    def convolution(self) -> nn.Conv2d:
        """The convolution again, with the weights that the layer has by now."""
        out_channels, in_channels = self.linear.out_features, self.linear.in_features
        result = nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=self.stride, device="meta")
        result.weight = nn.Parameter(self.linear.weight.detach()[..., None, None], self.linear.weight.requires_grad)
        result.bias = self.linear.bias
        return result.train(self.training)


def is_pointwise(module: nn.Module) -> bool:
    """Whether it is a convolution that mixes channels alone: 1x1, not grouped, not padded."""
    return (
        type(module) is nn.Conv2d
        and module.kernel_size == (1, 1)
        and module.groups == 1
        and module.padding in ((0, 0), "valid", "same")
        and module.in_channels > 1
    )
