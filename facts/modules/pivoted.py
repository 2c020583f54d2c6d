"""Pivoted low-rank layers: k rows or columns of the weight, and the others as combinations of them.

Source: Zhao, Zhang, Cannistraci, "Pivoting Factorization", ICML 2025. So k (d_in + d_out - k) values hold what two
factors hold in k (d_in + d_out).
"""

from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facts.modules.lowrank import LowRankLayer, linear, own_parameter

Layout = Literal["rows", "columns", "scattered rows", "scattered columns"]


class PivotedLinear(LowRankLayer):
    """`basis`, the pivots, and `coefficients`, the others as combinations of them.

    For `rows`, basis `[k, d_in]` and coefficients `[d_out - k, k]`: the pivots' outputs p = x basisᵀ, then the others'
    p coefficientsᵀ. For `columns`, basis `[d_out, k]` and coefficients `[k, d_in - k]`: the others' inputs are added to
    the pivots'. The pivots are the first k outputs or inputs, unless `order` permutes outputs, pivots first, to their
    places, or inputs to have the pivots first.
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
        (inner, width), (self.rank, others) = shapes if side == "rows" else (shape[::-1] for shape in shapes)
        if side not in ("rows", "columns") or inner != self.rank:
            raise ValueError(
                f"side must be rows or columns, got {side!r}, and basis {list(basis.shape)} and coefficients "
                f"{list(coefficients.shape)} must share their rank"
            )
        self.side, sizes = side, (self.rank + others, width)
        self.out_features, self.in_features = sizes if side == "rows" else sizes[::-1]
        self.basis, self.coefficients = own_parameter(basis), own_parameter(coefficients)
        self.bias = None if bias is None else own_parameter(bias)
        self.register_buffer("order", order)

    @classmethod
    def empty(cls, dense: nn.Linear, rank: int, layout: Layout) -> Self:
        """A layer of the dense one's size, type and bias; weights are not initialised, and `order` is the identity."""
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
        rows = x.reshape(-1, self.in_features)
        if self.side == "columns":
            outputs = self._by_columns(rows)
        elif self.order is None and _in_inference(x):
            outputs = self._by_rows_in_place(rows)
        else:
            outputs = self._by_rows(rows)
        return outputs.view(*x.shape[:-1], self.out_features)

    def _by_columns(self, x: Tensor) -> Tensor:
        if self.order is not None:
            x = _gather(x, self.order)
        pivots, others = x.split([self.rank, self.in_features - self.rank], dim=1)
        return linear(torch.addmm(pivots, others, self.coefficients.T), self.basis, self.bias)

    def _by_rows(self, x: Tensor) -> Tensor:
        pivots = F.linear(x, self.basis)
        outputs = torch.cat([pivots, F.linear(pivots, self.coefficients)], dim=1)
        if self.order is not None:
            outputs = _gather(outputs, self.order)
        return outputs if self.bias is None else outputs.add_(self.bias)

    def _by_rows_in_place(self, x: Tensor) -> Tensor:
        """The same, without a copy of the outputs, for which autograd and compilers have no use."""
        outputs = x.new_empty(len(x), self.out_features)
        pivots, others = outputs.split([self.rank, self.out_features - self.rank], dim=1)
        torch.mm(x, self.basis.T, out=pivots)
        torch.mm(pivots, self.coefficients.T, out=others)
        return outputs if self.bias is None else outputs.add_(self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, pivots={self.layout}"


def _gather(x: Tensor, order: Tensor) -> Tensor:
    """`x[:, order]`, up to ten times as fast on a CPU."""
    return x.gather(1, order.expand(x.shape[0], -1))  # `len` would fix the batch size of an exported network


def _in_inference(x: Tensor) -> bool:
    """Whether an output may be written into: something is computed, without gradients, tracing or autocast."""
    traced = x.is_meta or torch.compiler.is_compiling() or torch.jit.is_tracing()
    return not (traced or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type))
