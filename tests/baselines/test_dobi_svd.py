"""Dobi-SVD: its smooth truncation and the gradient, its budget, its weights."""

import pytest
import torch

from experiments.baselines.dobi_svd import DobiSVDSearch, SmoothTruncation, TruncatedLayer
from facts.modules.networks import replaced_forwards
from tests.networks import image_batches
from tests.search.problems import make_problem

SHARES = torch.tensor([1.0, 0.9, 0.6, 0.2, 0.0], dtype=torch.float64)


def by_svd(matrix, shares):
    """The same by PyTorch's SVD, whose gradient divides by differences of singular values."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return (u * s * shares[: len(s)]) @ vh


def gradients(truncate, matrix, shares):
    matrix, shares = matrix.clone().requires_grad_(), shares.clone().requires_grad_()
    weights = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(3), dtype=matrix.dtype)
    outputs = truncate(matrix, shares)
    return outputs.detach(), *torch.autograd.grad((outputs * weights).sum(), (matrix, shares))


def a_matrix(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(size):
    return torch.linalg.qr(a_matrix(size, size, seed=1))[0]


@pytest.mark.parametrize("rows", [5, 40])
def test_truncation_is_by_the_svd_where_values_are_apart(rows):
    matrix = a_matrix(rows, 5)
    found, expected = (gradients(function, matrix, SHARES) for function in (SmoothTruncation.apply, by_svd))
    for value, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "values", [[1, 1, 1, 1, 1], [3, 2, 2, 1, 0.5], [3, 2, 1, 1 - 1e-13, 0.5], [3, 2, 0, 0, 0], [0, 0, 0, 0, 0]]
)
def test_the_gradient_is_finite_where_values_tie(values):
    """Where PyTorch's is infinite, NaN or of the size of the inverse difference."""
    matrix = orthogonal(5) * torch.tensor(values, dtype=torch.float64) @ orthogonal(5).mT
    outputs, of_matrix, of_shares = gradients(SmoothTruncation.apply, matrix, SHARES)
    assert outputs.isfinite().all() and of_shares.isfinite().all()
    assert of_matrix.abs().max() < 100  # terms of the series times the weights


def test_the_gradient_of_the_ranks_is_that_of_finite_differences():
    """Of the network's loss and of the cost, at ranks that are not whole."""
    problem = make_problem()
    layers = [TruncatedLayer(problem, name, 3.0) for name in problem.layers]
    (images, labels), *_ = image_batches([8])

    def loss_and_cost(ranks):
        with replaced_forwards({layer.dense: layer.forward for layer in layers}):
            for layer, rank in zip(layers, ranks, strict=True):
                layer.rank = rank
            loss = problem.calibration.loss(problem.model(images), labels)
        return loss, sum(layer.cost(rank) for layer, rank in zip(layers, ranks, strict=True)) / 1000

    ranks = torch.tensor([2.3, 1.6, 3.1, 4.7, 2.2, 5.4], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss_and_cost, (ranks,), eps=1e-3, atol=5e-9, rtol=1e-3)


def test_the_decompositions_are_projections_with_the_best_outputs_of_their_rank():
    """By Eckart and Young's theorem, for the first layer, which sees the data as they are, in one batch."""
    problem = make_problem(data=image_batches([16]))
    result = DobiSVDSearch(num_epochs=1).allocate(problem)
    assert set(result.plan.values()) != {None} and problem.fits(result.plan)
    for name, layer in problem.layers.items():
        decomposition = result.decompositions[name]
        torch.testing.assert_close(decomposition.left @ decomposition.right, layer.weight.detach())
        if rank := result.plan[name]:
            left, right = decomposition.truncate(rank)
            torch.testing.assert_close(left.mT @ left, torch.eye(rank, dtype=torch.float64))
            torch.testing.assert_close(right, left.mT @ layer.weight.detach())
    seen = []
    handle = problem.layers["grid"].register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, -2)))
    problem.model(image_batches([16])[0][0])
    handle.remove()
    rank, outputs = result.plan["grid"], seen[0] @ problem.layers["grid"].weight.detach().mT
    left, right = result.decompositions["grid"].truncate(rank)
    error = (seen[0] @ (left @ right).mT - outputs).square().sum()
    torch.testing.assert_close(error, torch.linalg.svdvals(outputs)[rank:].square().sum())
