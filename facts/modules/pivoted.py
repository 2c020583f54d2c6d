"""Pivoted low-rank layers: k rows or columns of the weight, and the others as combinations of them.

Source: Zhao, Zhang, Cannistraci, "Pivoting Factorization", ICML 2025. This stores k (d_in + d_out - k) values, where
two factors store k (d_in + d_out).
"""

from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from facts.modules.lowrank import LowRankLayer, linear, own_parameter

Layout = Literal["rows", "columns", "scattered rows", "scattered columns"]


class PivotedLinear(LowRankLayer):
    """A layer stored as `basis`, the pivots, and `coefficients`, which give the others as combinations of them.

    For `rows`, basis `[k, d_in]` and coefficients `[d_out - k, k]`: the pivots' outputs are p = x basisᵀ, the others'
    p coefficientsᵀ. For `columns`, basis `[d_out, k]` and coefficients `[k, d_in - k]`: the others' inputs are combined
    and added to the pivots'. The pivots are the first k outputs or inputs, unless there is an `order`: it moves
    outputs, computed pivots first, to their places, or moves the pivots to the front of the inputs.
    """

    order: Tensor | None

    def __init__(
        self,
        side: Literal["rows", "columns"],
        basis: Tensor,
        coefficients: Tensor,
        bias: Tensor | None = None,
        order: Tensor | None = None,
    ):
        super().__init__()
        shapes = (basis.shape, coefficients.shape[::-1])
        (_, width), (self.rank, others) = shapes if side == "rows" else (shape[::-1] for shape in shapes)
        self.side, sizes = side, (self.rank + others, width)
        self.out_features, self.in_features = sizes if side == "rows" else sizes[::-1]
        self.basis, self.coefficients = own_parameter(basis), own_parameter(coefficients)
        self.bias = None if bias is None else own_parameter(bias)
        self.register_buffer("order", order)

    @classmethod
    def empty(cls, dense: nn.Linear, rank: int, layout: Layout) -> Self:
        """Make an uninitialised layer with the dense one's size, type and bias; a scattered `order` is the identity."""
        weight, by_rows = dense.weight, layout.endswith("rows")
        size, other = weight.shape if by_rows else weight.shape[::-1]
        shapes = (rank, other), (size - rank, rank)
        basis, coefficients = (weight.new_empty(shape if by_rows else shape[::-1]) for shape in shapes)
        order = torch.arange(size, device=weight.device) if layout.startswith("scattered") else None
        return cls("rows" if by_rows else "columns", basis, coefficients, dense.bias, order)

    @property
    def layout(self) -> Layout:
        return self.side if self.order is None else f"scattered {self.side}"  # type: ignore[return-value]

    @property
    def num_weights(self) -> int:
        return self.rank * (self.out_features + self.in_features - self.rank)

    def factors(self) -> tuple[Tensor, Tensor]:
        identity = torch.eye(self.rank, dtype=self.basis.dtype, device=self.basis.device)
        if self.side == "rows":
            left = torch.cat([identity, self.coefficients])
            return left if self.order is None else left[self.order], self.basis
        right = torch.cat([identity, self.coefficients], dim=1)
        return self.basis, right if self.order is None else right[:, self.order.argsort()]

    def forward(self, x: Tensor) -> Tensor:
        return pivoted_product(x, self.side, self.basis, self.coefficients, self.bias, self.order)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, pivots={self.layout}"


@torch.fx.wrap  # one node of a graph: the function reads devices and shapes, which a symbolic trace does not have
def pivoted_product(
    x: Tensor, side: str, basis: Tensor, coefficients: Tensor, bias: Tensor | None, order: Tensor | None
) -> Tensor:
    """Apply a `PivotedLinear` to vectors `[..., d_in]`."""
    rows = x.reshape(-1, x.shape[-1])
    if side == "columns":
        rows = rows if order is None else _gather(rows, order)
        pivots, others = rows.split([*coefficients.shape], dim=1)
        outputs = linear(torch.addmm(pivots, others, coefficients.T), basis, bias)
    elif order is None and _in_inference(x):
        outputs = _by_rows_in_place(rows, basis, coefficients, bias)
    else:
        outputs = _by_rows(rows, basis, coefficients, bias, order)
    return outputs.view(*x.shape[:-1], outputs.shape[1])


def _by_rows(x: Tensor, basis: Tensor, coefficients: Tensor, bias: Tensor | None, order: Tensor | None) -> Tensor:
    pivots = F.linear(x, basis)
    outputs = torch.cat([pivots, F.linear(pivots, coefficients)], dim=1)
    outputs = outputs if order is None else _gather(outputs, order)
    return outputs if bias is None else outputs.add_(bias)


def _by_rows_in_place(x: Tensor, basis: Tensor, coefficients: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the same without copying the outputs, which autograd and compilers do not support."""
    sizes = coefficients.shape[::-1]
    outputs = x.new_empty(len(x), sum(sizes))
    pivots, others = outputs.split([*sizes], dim=1)
    torch.mm(x, basis.T, out=pivots)
    torch.mm(pivots, coefficients.T, out=others)
    return outputs if bias is None else outputs.add_(bias)


def _gather(x: Tensor, order: Tensor) -> Tensor:
    """`x[:, order]`, up to ten times as fast on a CPU."""
    return x.gather(1, order.expand(x.shape[0], -1))  # `len` would fix the batch size of an exported network


def _in_inference(x: Tensor) -> bool:
    """Check that outputs may be written in place: values are computed, and operations neither traced nor recorded."""
    traced = x.is_meta or torch.compiler.is_compiling() or torch.jit.is_tracing()
    if traced or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return False
    # Neither `vmap` and the like nor forward-mode derivatives may be active; both also work with gradients disabled.
    return torch._C._functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0
