"""Choice of the pivots of a low-rank layer."""

from collections.abc import Callable

import scipy
import torch
from torch import Tensor

from facts.modules.pivoted import PivotedLinear

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
        layers = _by_rows(choice, left, right, bias, dtype), _by_columns(choice, left, right, bias, dtype)
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


def _by_rows(choice: Choice, left: Tensor, right: Tensor, bias: Tensor | None, dtype: torch.dtype) -> PivotedLinear:
    coefficients, pivots, first = _chosen(choice, left, right)
    order = None if first is None else first.argsort()
    return PivotedLinear("rows", (left[pivots] @ right).to(dtype), coefficients.to(dtype), bias, order)


def _by_columns(choice: Choice, left: Tensor, right: Tensor, bias: Tensor | None, dtype: torch.dtype) -> PivotedLinear:
    coefficients, pivots, first = _chosen(choice, right.T, left.T)
    return PivotedLinear("columns", (left @ right[:, pivots]).to(dtype), coefficients.T.to(dtype), bias, first)


def _chosen(choice: Choice, left: Tensor, right: Tensor) -> tuple[Tensor, slice | Tensor, Tensor | None]:
    """Coefficients, the pivots among the rows of `left @ right`, and the permutation, if any, that puts them first."""
    rank = len(right)
    coefficients, first = choice(left @ torch.linalg.qr(right.T, mode="r").R.T)  # rows with the same inner products
    return coefficients, slice(rank) if first is None else first[:rank], first


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
