"""Forms of a low-rank layer: two plain factors, or pivots and the other rows or columns as combinations of them.

Source of the pivoted form: Zhao, Zhang, Cannistraci, "Pivoting Factorization", ICML 2025. It stores
k (d_in + d_out - k) values, where two factors store k (d_in + d_out).
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import scipy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from facts.modules.lowrank import LowRankLayer, LowRankLinear, linear, own_parameter

Side = Literal["rows", "columns"]
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
        self, side: Side, basis: Tensor, coefficients: Tensor, bias: Tensor | None = None, order: Tensor | None = None
    ):
        super().__init__()
        shapes = (basis.shape, coefficients.shape[::-1])
        (_, width), (self.rank, others) = shapes if side == "rows" else (shape[::-1] for shape in shapes)
        self.side, sizes = side, (self.rank + others, width)
        self.out_features, self.in_features = sizes if side == "rows" else sizes[::-1]
        self.basis, self.coefficients = own_parameter(basis), own_parameter(coefficients)
        self.bias = None if bias is None else own_parameter(bias)
        self.register_buffer("order", order)

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


LEADING_ERROR = 5e-6  # relative; two plain factors have 1e-7 in float32

# From rows `[d, k]` of rank k to the coefficients `[d - k, k]` of the others on k pivots, and a permutation `[d]` that
# puts the pivots first (None if they are already the first k).
Choice = Callable[[Tensor], tuple[Tensor, Tensor | None]]


def pivoted_layer(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    arithmetic: torch.dtype | None = None,
) -> PivotedLinear:
    """Make the layer with the weight `left [d_out, k] @ right [k, d_in]`, stored as `dtype` (default: that of `left`).

    The leading rows or columns are the pivots if the weight's error in the type `arithmetic` (default: `dtype`) is at
    most `LEADING_ERROR`, or 1.5 times that of two plain factors; otherwise QR with column pivoting chooses them. Of
    rows and columns, the more accurate are used. Everything is computed in float64.
    """
    dtype = dtype or left.dtype
    left, right = left.detach().double(), right.detach().double()
    exact = left @ right

    def error(factors: tuple[Tensor, Tensor]) -> float:
        """Relative error of the product in the arithmetic's type, whose range does not matter: factors are scaled."""
        sizes = [factor.abs().amax().double().clamp(min=torch.finfo(torch.float64).tiny) for factor in factors]
        first, second = ((factor / size).to(arithmetic or dtype) for factor, size in zip(factors, sizes, strict=True))
        return relative_error(first @ second, exact / sizes[0] / sizes[1])  # sizes[0] * sizes[1] may be 0

    def better_side(choice: Choice) -> tuple[float, PivotedLinear]:
        sides: tuple[Side, ...] = ("rows", "columns")
        layers = [_with_pivots(side, choice, left, right, bias, dtype) for side in sides]
        return min(((error(layer.factors()), layer) for layer in layers), key=lambda pair: pair[0])

    least, layer = better_side(_leading)
    if least > max(LEADING_ERROR, 1.5 * error((left, right))):
        _, layer = better_side(_by_qr)
    return layer


def arithmetic_of(weight: Tensor, precision: torch.dtype) -> torch.dtype:
    """Type as precise as products with a weight: autocast's, the weight's own, or float16 for TensorFloat-32."""
    if precision != torch.float32:
        return precision
    rounded = weight.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return torch.float16 if rounded and weight.dtype == torch.float32 else weight.dtype


@torch.no_grad()
def relative_error(weight: Tensor, exact: Tensor) -> float:
    """‖weight - exact‖_F / ‖exact‖_F: infinite if a value is NaN, 0 on the meta device."""
    if weight.is_meta:
        return 0.0
    size = torch.linalg.norm(exact).clamp(min=torch.finfo(torch.float64).tiny)
    return (torch.linalg.norm(weight.double() - exact) / size).nan_to_num(torch.inf).item()


def _with_pivots(
    side: Side, choice: Choice, left: Tensor, right: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> PivotedLinear:
    outer, inner = (left, right) if side == "rows" else (right.T, left.T)
    # The argument's rows have the inner products of the weight's rows, or of its columns.
    coefficients, first = choice(outer @ torch.linalg.qr(inner.T, mode="r").R.T)
    pivots = slice(len(right)) if first is None else first[: len(right)]
    if side == "columns":
        return PivotedLinear(side, (left @ right[:, pivots]).to(dtype), coefficients.T.to(dtype), bias, first)
    order = None if first is None else first.argsort()
    return PivotedLinear(side, (left[pivots] @ right).to(dtype), coefficients.to(dtype), bias, order)


def _leading(rows: Tensor) -> tuple[Tensor, None]:
    """Choose the first k rows; if these are singular, coefficients are not finite."""
    rank = rows.shape[1]
    return torch.linalg.solve_ex(rows[:rank].T, rows[rank:].T).result.T, None


def _by_qr(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Choose pivots by QR with column pivoting; those beyond the rank, by R's diagonal, get zero coefficients."""
    size, rank = rows.shape
    triangle, permutation = scipy.linalg.qr(rows.T.cpu().numpy(), mode="r", pivoting=True)
    triangle = torch.from_numpy(triangle).to(rows)
    diagonal = triangle.diagonal().abs()
    own = int((diagonal > size * torch.finfo(rows.dtype).eps * diagonal[0]).sum())
    coefficients = rows.new_zeros(size - rank, rank)
    coefficients[:, :own] = torch.linalg.solve_triangular(triangle[:own, :own], triangle[:own, rank:], upper=True).T
    return coefficients, torch.from_numpy(permutation).long().to(rows.device)


FormName = Literal["plain", "pivoted"]


@dataclass(frozen=True)
class Form(ABC):
    """How a layer of rank k is stored, accurate enough to run in `precision`, and how many weights that takes."""

    name: ClassVar[FormName]
    precision: torch.dtype = torch.float32

    @abstractmethod
    def layer(self, dense: nn.Linear, left: Tensor, right: Tensor) -> LowRankLayer:
        """Make the layer `left [d_out, k] @ right [k, d_in]` to replace a dense one."""

    @abstractmethod
    def empty(self, dense: nn.Linear, rank: int) -> LowRankLayer:
        """Make a layer with the dense one's size, type and bias but meaningless weights."""

    @abstractmethod
    def num_weights(self, d_out: int, d_in: int, rank: int) -> int:
        """Count the weights of a layer, which are also its multiply-accumulates per vector."""

    def full_rank(self, d_out: int, d_in: int) -> int:
        """The largest rank at which the layer costs no more than the dense one."""
        return self._largest_rank(d_out, d_in, d_out * d_in)

    def rank_of_ratio(self, d_out: int, d_in: int, ratio: float) -> int:
        """The rank for a cost of at most `ratio` of the dense layer's, but at least rank 1 (paper, section 5.1)."""
        return max(1, self._largest_rank(d_out, d_in, math.floor(Fraction(str(ratio)) * d_out * d_in)))

    def _largest_rank(self, d_out: int, d_in: int, allowed: int) -> int:
        ranks = range(1, min(d_out, d_in) + 1)
        return bisect_right(ranks, allowed, key=lambda rank: self.num_weights(d_out, d_in, rank))


class Plain(Form):
    """Two factors, `[d_out, k]` and `[k, d_in]`."""

    name = "plain"

    def layer(self, dense: nn.Linear, left: Tensor, right: Tensor) -> LowRankLayer:
        return LowRankLinear(left.to(dense.weight), right.to(dense.weight), dense.bias)

    def empty(self, dense: nn.Linear, rank: int) -> LowRankLayer:
        weight = dense.weight
        left, right = weight.new_empty(dense.out_features, rank), weight.new_empty(rank, dense.in_features)
        return _filled(LowRankLinear(left, right, dense.bias))

    def num_weights(self, d_out: int, d_in: int, rank: int) -> int:
        return rank * (d_out + d_in)

    def rank_of_ratio(self, d_out: int, d_in: int, ratio: float) -> int:
        return max(1, int(self.full_rank(d_out, d_in) * ratio))


@dataclass(frozen=True)
class Pivoted(Form):
    """k pivots among the rows or columns, and the coefficients of the others: never more expensive than dense.

    An empty layer has the `layout`, by default the one that takes longest in this precision.
    """

    name = "pivoted"
    layout: Layout | None = None

    def layer(self, dense: nn.Linear, left: Tensor, right: Tensor) -> LowRankLayer:
        left, right = left.to(dense.weight.device), right.to(dense.weight.device)
        return pivoted_layer(left, right, dense.bias, dense.weight.dtype, arithmetic_of(dense.weight, self.precision))

    def empty(self, dense: nn.Linear, rank: int) -> LowRankLayer:
        weight = dense.weight
        leads = torch.finfo(arithmetic_of(weight, self.precision)).eps < LEADING_ERROR
        layout = self.layout or ("columns" if leads else "scattered columns")
        by_rows = layout.endswith("rows")
        size, other = weight.shape if by_rows else weight.shape[::-1]
        shapes = (rank, other), (size - rank, rank)
        basis, coefficients = (weight.new_empty(shape if by_rows else shape[::-1]) for shape in shapes)
        order = torch.arange(size, device=weight.device).flip(0) if layout.startswith("scattered") else None
        return _filled(PivotedLinear("rows" if by_rows else "columns", basis, coefficients, dense.bias, order))

    def num_weights(self, d_out: int, d_in: int, rank: int) -> int:
        return rank * (d_out + d_in - rank)


PLAIN = Plain()
FORMS: dict[FormName, type[Form]] = {"plain": Plain, "pivoted": Pivoted}


def default_form(model: nn.Module, precision: torch.dtype) -> FormName:
    """Choose pivoted layers, but plain ones in half precision, where pivots have to be permuted."""
    types = {precision, *(parameter.dtype for parameter in model.parameters())}
    return "plain" if types & {torch.bfloat16, torch.float16} else "pivoted"


def form_named(name: FormName, precision: torch.dtype) -> Form:
    """The form with a name. Raises `ValueError`, which lists the choices, for an unknown one."""
    if name not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {name!r}")
    return FORMS[name](precision)


def _filled(layer: LowRankLayer) -> LowRankLayer:
    """Fill the weights with equal entries that preserve the magnitude of their inputs."""
    for parameter in layer.parameters():
        if parameter is not layer.bias:
            nn.init.constant_(parameter, 1 / max(1, parameter.shape[1]))
    return layer
