"""Low-rank linear layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LowRankLinear(nn.Module):
    """`x @ rightᵀ @ leftᵀ + bias`: a linear layer of rank k with `left [d_out, k]` and `right [k, d_in]`.

    A drop-in replacement for `nn.Linear`: any leading shape, `.in_features`, `.out_features`, `.bias`, and `.weight`,
    the product, for code that reads it.
    """

    def __init__(self, left: Tensor, right: Tensor, bias: Tensor | None = None):
        super().__init__()
        if left.shape[1] != right.shape[0]:
            raise ValueError(f"left {list(left.shape)} and right {list(right.shape)} must share their rank")
        # Rows in order, as a loaded file has them: outputs depend on the layout in their last bit.
        self.left = nn.Parameter(left.detach().clone(memory_format=torch.contiguous_format))
        self.right = nn.Parameter(right.detach().clone(memory_format=torch.contiguous_format))
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    @property
    def in_features(self) -> int:
        return self.right.shape[1]

    @property
    def out_features(self) -> int:
        return self.left.shape[0]

    @property
    def rank(self) -> int:
        return self.left.shape[1]

    @property
    def weight(self) -> Tensor:
        return self.left @ self.right

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(x, self.right)
        if self.bias is None or x.device.type != "cpu":
            return F.linear(hidden, self.left, self.bias)
        return F.linear(hidden, self.left).add_(self.bias)  # faster than a product that starts from copies of the bias

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}, bias={bias}"
