"""Dobi-SVD: its smooth truncation and the gradient, its budget, its weights."""

import pytest
import torch

from experiments.baselines.dobi_svd import DobiSVDSearch, SmoothTruncation, TruncatedLayer
from facts.modules.networks import replaced_forwards
from tests.networks import image_batches
from tests.search.problems import make_problem


@pytest.mark.parametrize(
    "values", [[1, 1, 1, 1, 1], [3, 2, 2, 1, 0.5], [3, 2, 1, 1 - 1e-13, 0.5], [3, 2, 0, 0, 0], [0, 0, 0, 0, 0]]
)
def test_the_gradient_is_finite_where_values_tie(values):
    """Where PyTorch's is infinite, NaN or of the size of the inverse difference."""
    vectors, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))
    matrix = (vectors * torch.tensor(values, dtype=torch.float64) @ vectors.mT).requires_grad_()
    shares = torch.tensor([1.0, 0.9, 0.6, 0.2, 0.0], dtype=torch.float64, requires_grad=True)
    outputs = SmoothTruncation.apply(matrix, shares)
    of_matrix, of_shares = torch.autograd.grad((outputs * torch.randn_like(outputs)).sum(), (matrix, shares))
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
