"""Dobi-SVD: ranks trained through a smooth truncation of the layers' outputs (Wang et al., 2025).

The weights follow in closed form: they are projected on what the truncated outputs of all batches have in common.
Legend: Y `[M, d]` a matrix, s its singular values, V `[d, d]` its right singular vectors, t `[d]` the shares to keep.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from facts.calibration.data import Batch
from facts.decomposition.truncation import Decomposition
from facts.modules.networks import frozen, replaced_forwards
from facts.moments.statistics import at_least_tiny
from facts.search import AllocationProblem, Plan, Search, SearchResult
from facts.search.training import Training, current_loss, current_outputs
from facts.utils.options import Count, Positive, options
from facts.utils.progress import with_progress

HALVINGS = 50  # of the interval for the factor that makes ranks fit
TIE = 1e-10  # of the larger of two squared singular values: closer ones count as equal
NUM_TERMS = 11  # of the series that stands in for the inverse of their difference, as in Dobi-SVD's code


@options
class DobiSVDSearch(Search):
    """Train one real rank per layer, which sets the share of each singular component of its outputs that is kept.

    Component i is multiplied by ½ tanh(`steepness` (rank + ½ - i)) + ½. The loss is the task's, in units of its value
    at the start (the same ratio for all layers, first batch), plus `penalty` · |kept ratio - allowed ratio|, plus the
    squared distances of ranks from 1 .. min(d_in, d_out). Adam's rate falls along a cosine from the first of
    `learning_rates` to the second, in shares of min(d_in, d_out). Finally, all ranks are multiplied by the largest
    factor whose rounded ranks meet the budget; a layer that would cost no less than dense stays dense.

    Each step takes an eigendecomposition of size min(d_in, d_out) per use of a layer, which is slower than the network.
    """

    num_epochs: Count = 20
    learning_rates: tuple[Positive, Positive] = (0.00244, 0.00195)
    steepness: Positive = 2.0
    penalty: Positive = 20.0

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        layers = {name: TruncatedLayer(problem, name, self.steepness) for name in problem.layers}
        ranks = self.train(problem, list(layers.values()))
        plan = fitting_plan(problem, dict(zip(layers, ranks.tolist(), strict=True)))
        return SearchResult(plan, decompositions=_projected(problem, layers, plan))

    def train(self, problem: AllocationProblem, layers: list["TruncatedLayer"]) -> Tensor:
        """Return the trained ranks. Raises `ValueError` for a loss that is NaN or infinite."""
        calibration = problem.training_batches()
        sizes = torch.tensor([layer.size for layer in layers], dtype=torch.float64, device=problem.device)
        dense, budget = sizes.new_tensor(problem.dense), sizes.new_tensor(problem.budget)
        start = sizes.new_tensor([layer.rank_of_shares((budget / dense).tolist()) for layer in layers])
        shares = (start / sizes).requires_grad_()
        first, last = self.learning_rates
        training = Training(torch.optim.Adam([shares], lr=first), self.num_epochs, last_rate=last)
        forwards: dict[nn.Module, Callable] = {layer.dense: layer.forward for layer in layers}

        def truncated_loss(ranks: Tensor, batch: Batch) -> Tensor:
            for layer, rank in zip(layers, ranks, strict=True):
                layer.rank = rank
            return current_loss(problem.prepared, batch)

        def loss_at(epoch: int, batch: Batch) -> Tensor:
            ranks = shares * sizes
            kept = sum(layer.cost(rank) for layer, rank in zip(layers, ranks, strict=True))
            outside = (1 - ranks).relu().square().sum() + (ranks - sizes).relu().square().sum()
            excess = ((kept - budget) / dense).max().abs()
            loss = truncated_loss(ranks, batch) / unit + self.penalty * excess + outside
            if not loss.isfinite():
                raise ValueError("Dobi-SVD's training diverges: the loss at its ranks is NaN or infinite")
            return loss

        with torch.no_grad(), frozen(problem.model), replaced_forwards(forwards):
            unit = at_least_tiny(truncated_loss(start, next(iter(calibration))).abs())
        training.run(problem, self, forwards, loss_at)
        return (shares * sizes).detach()


def fitting_plan(problem: AllocationProblem, ranks: Mapping[str, float]) -> Plan:
    """Multiply ranks by the largest factor whose rounded ranks meet the budget; a rank that saves nothing is None."""

    def choice(name: str, rank: int) -> int | None:
        rank = max(1, min(rank, *problem.layers[name].weight.shape))
        costs = zip(problem.cost(name, rank), problem.cost(name, None), strict=True)
        return rank if any(low < dense for low, dense in costs) else None

    def at(factor: float) -> Plan:
        return {name: choice(name, round(factor * max(1.0, rank))) for name, rank in ranks.items()}

    low, high = 0.0, float(max(min(layer.weight.shape) for layer in problem.layers.values()))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if problem.fits(at(middle)) else (low, middle)
    return at(low)


def _projected(problem: AllocationProblem, layers: dict[str, "TruncatedLayer"], plan: Plan) -> dict[str, Decomposition]:
    """Project the weights on the common subspace of the batches' outputs, with earlier layers truncated."""
    truncated = {name: layers[name] for name, rank in plan.items() if rank is not None}
    for name, layer in truncated.items():
        layer.rank = torch.tensor(plan[name], device=problem.device)
    forwards: dict[nn.Module, Callable] = {layer.dense: layer.project for layer in truncated.values()}
    with torch.no_grad(), frozen(problem.model), replaced_forwards(forwards):
        for inputs, _ in with_progress(problem.training_batches(), "Dobi-SVD's weights"):
            current_outputs(problem.prepared, inputs)
    return {**problem.decompositions, **{name: layer.decomposition() for name, layer in truncated.items()}}


class TruncatedLayer:
    """A layer whose outputs `basis @ core @ x`, less the bias, are truncated at a rank."""

    def __init__(self, problem: AllocationProblem, name: str, steepness: float):
        self.dense: nn.Linear = problem.layers[name]
        self.steepness = steepness
        weight = self.dense.weight.detach()
        self.basis, self.core = torch.linalg.qr(weight.double())  # [d_out, r], [r, d_in]
        self.size = min(weight.shape)
        self.mean = problem.decompositions[name].mean
        self.input = weight.new_zeros(weight.shape[1]) if self.mean is None else self.mean.to(weight)
        self.offset = nn.functional.linear(self.input, weight, self.dense.bias).detach()  # truncation keeps it
        dense = problem.cost(name, None)
        costs = [[0] * len(dense), *(problem.cost(name, rank) for rank in range(1, self.size + 1))]
        self.costs = torch.tensor(costs, dtype=torch.float64, device=weight.device)
        self.costs = torch.minimum(self.costs, self.costs.new_tensor(dense))
        self.projectors = self.core.new_zeros(self.size, self.size)
        self.rank = self.core.new_tensor(self.size)

    def cost(self, rank: Tensor) -> Tensor:
        """Cost at a rank, linear between whole ones, `[bounds]`; at most that of the dense layer."""
        below = int(rank.detach().clamp(0, self.size - 1))
        return self.costs[below] + (rank - below) * (self.costs[below + 1] - self.costs[below])

    def rank_of_shares(self, shares: Iterable[float]) -> float:
        """Find the largest real rank whose costs are at most these shares of the dense layer's; at least 1."""
        columns, ranks = self.costs.T.cpu().numpy(), range(self.size + 1)
        found = (np.interp(share * costs[-1], costs, ranks) for share, costs in zip(shares, columns, strict=True))
        return max(1.0, float(min(found)))

    def forward(self, x: Tensor) -> Tensor:
        components = torch.arange(1, self.size + 1, device=self.rank.device)
        shares = 0.5 * torch.tanh(self.steepness * (self.rank + 0.5 - components)) + 0.5
        return self._outputs(SmoothTruncation.apply(self._coordinates(x), shares), x)

    def project(self, x: Tensor) -> Tensor:
        """Truncate at a whole rank, and add to the projectors."""
        coordinates = self._coordinates(x)
        values, vectors = right_vectors(coordinates)
        leading = vectors[:, : min(int(self.rank), int(values.count_nonzero()))]
        projector = leading @ leading.mT
        self.projectors += projector
        return self._outputs(coordinates @ projector.to(coordinates), x)

    def _coordinates(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x - self.input.to(x), self.core.to(x)).flatten(0, -2)

    def _outputs(self, coordinates: Tensor, x: Tensor) -> Tensor:
        outputs = nn.functional.linear(coordinates, self.basis.to(coordinates), self.offset.to(coordinates))
        return outputs.unflatten(0, x.shape[:-1])

    def decomposition(self) -> Decomposition:
        values, vectors = falling_eigh(self.projectors)  # the first k span what the batches' subspaces share most
        dtype = torch.promote_types(self.dense.weight.dtype, torch.float32)
        left, right = self.basis @ vectors, vectors.mT @ self.core
        return Decomposition(left.to(dtype), right.to(dtype), values, mean=self.mean)


def falling_eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues of a symmetric matrix, falling, and eigenvectors."""
    values, vectors = torch.linalg.eigh(matrix)
    return values.flip(0), vectors.flip(1)


def right_vectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """`s² [d]`, falling, and V of Y in float64, from YᵀY; values that are zero up to rounding become zero."""
    exact = matrix.double()
    values, vectors = falling_eigh(exact.mT @ exact)
    smallest = len(values) * torch.finfo(values.dtype).eps * values[0]
    return values.where(values > smallest, 0), vectors


class SmoothTruncation(torch.autograd.Function):
    """Y V diag(t) Vᵀ, in the type of Y; t belongs to the singular values in falling order.

    The gradient is that of the SVD, written for the projection: between two components it is (t_i - t_j) / (s_i² -
    s_j²), so equally kept ones do not matter. Ties use the first terms of the inverse's geometric series.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, shares: Tensor) -> Tensor:
        values, vectors = right_vectors(matrix)
        ctx.save_for_backward(matrix, shares, values, vectors)
        return (matrix.double() @ ((vectors * shares.double()) @ vectors.mT)).to(matrix.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        matrix, shares, values, vectors = ctx.saved_tensors
        exact, grad, kept = matrix.double(), grads[0].double(), shares.double()
        of_projector = vectors.mT @ (exact.mT @ grad) @ vectors
        weights = (kept[:, None] - kept) * inverse_gaps(values)
        of_gram = vectors @ (weights * (of_projector + of_projector.mT) / 2) @ vectors.mT
        of_matrix = grad @ ((vectors * kept) @ vectors.mT) + 2 * exact @ of_gram
        return of_matrix.to(matrix.dtype), of_projector.diagonal().to(shares.dtype)


def inverse_gaps(values: Tensor) -> Tensor:
    """1 / (v_i - v_j) `[d, d]` of falling values: antisymmetric, finite for equal ones, zero between zeros."""
    larger, smaller = torch.maximum(values[:, None], values), torch.minimum(values[:, None], values)
    quotient = smaller / larger.where(larger > 0, 1)
    series = torch.ones_like(quotient)
    for _ in range(NUM_TERMS - 1):
        series = 1 + quotient * series
    terms = series.where(1 - quotient <= TIE, 1 / (1 - quotient))
    inverse = (terms / larger).where(larger > 0, 0)
    return inverse.triu(1) - inverse.tril(-1)
