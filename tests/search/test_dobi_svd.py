"""Dobi-SVD: its smooth truncation, its budget, its weights."""

import math

import pytest
import torch

import facts
from facts.search import DobiSVDSearch
from facts.search.methods.dobi_svd import TruncatedLayer, fitting_plan, leading_subspace, smooth_step
from facts.search.stable_svd import SmoothTruncation
from tests.networks import UNIFORM, image_batches, make_model
from tests.search.problems import make_problem


@pytest.mark.parametrize("steepness", [10.0, 20.0, 40.0])
def test_at_a_whole_rank_the_truncation_is_the_hard_one(steepness):
    """The position k of the formula lies half a component above; what is left or lacking is at most exp(-steepness)."""
    torch.manual_seed(0)
    matrix = torch.randn(30, 8, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    for rank in range(1, 9):
        steps = smooth_step(torch.tensor(float(rank)), 8, steepness).double()
        hard = torch.cat([torch.ones(rank), torch.zeros(8 - rank)])
        assert (steps - hard).abs().max() <= math.exp(-steepness) + 1e-7  # of float32
        error = (SmoothTruncation.apply(matrix, steps) - (u * s * hard) @ vh).norm()
        assert error <= (math.exp(-steepness) + 1e-7) * matrix.norm()
        with_k = 0.5 * torch.tanh(steepness * (rank + 0.5 - torch.arange(1, 9))) + 0.5
        torch.testing.assert_close(steps.float(), with_k)


def test_the_gradient_of_the_ranks_is_that_of_finite_differences():
    """Of the network's loss and of the cost, at ranks that are not whole."""
    problem = make_problem()
    layers = [TruncatedLayer(problem, name, 3.0) for name in problem.layers]
    (images, labels), *_ = image_batches([8])

    def loss_and_cost(ranks):
        with facts.modules.modes.replaced_forwards({layer.dense: layer.forward for layer in layers}):
            for layer, rank in zip(layers, ranks, strict=True):
                layer.rank = rank
            loss = problem.loss(problem.model(images), labels)
        return loss, sum(layer.cost(rank) for layer, rank in zip(layers, ranks, strict=True)) / 1000

    ranks = torch.tensor([2.3, 1.6, 3.1, 4.7, 2.2, 5.4], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss_and_cost, (ranks,), eps=1e-3, atol=5e-9, rtol=1e-3)


def test_a_cost_is_that_of_the_problem_at_whole_ranks_and_at_most_dense():
    problem = make_problem(bounds={"flops": 0.5, "params": 0.5})
    for name in problem.layers:
        layer = TruncatedLayer(problem, name, 10.0)
        dense = problem.cost(name, None)
        for rank in range(1, layer.size + 1):
            expected = [min(pair) for pair in zip(problem.cost(name, rank), dense, strict=True)]
            assert layer.cost(torch.tensor(float(rank))).tolist() == expected
        middle = layer.cost(torch.tensor(1.5)).tolist()
        assert middle == [sum(pair) / 2 for pair in zip(problem.cost(name, 1), problem.cost(name, 2), strict=True)]


def test_it_starts_with_the_same_ratio_for_all_layers():
    """The share of the dense cost that plain factors of rank k take is k (m + n) / (m n); of two the lower rank."""
    problem = make_problem(bounds={"flops": 0.5, "params": 0.5})
    for name, linear in problem.layers.items():
        m, n = linear.weight.shape
        assert TruncatedLayer(problem, name, 10.0).rank_of_shares([0.6, 0.55]) == pytest.approx(0.55 * m * n / (m + n))
        assert TruncatedLayer(problem, name, 10.0).rank_of_shares([0.6, 0.01]) == 1


@pytest.mark.parametrize("bounds", [{"flops": 0.5}, {"params": 0.3}, {"flops": 0.8, "params": 0.6}])
def test_ranks_are_multiplied_by_the_largest_factor_that_fits(bounds):
    problem = make_problem(bounds=bounds)
    ranks = dict(zip(problem.layers, [2.3, 1.6, 3.1, 4.7, -1.0, 9.4], strict=True))
    plan = fitting_plan(problem, ranks)
    assert problem.fits(plan)

    def at(factor):
        full = {name: min(layer.weight.shape) for name, layer in problem.layers.items()}
        rounded = {name: max(1, min(round(factor * max(1, rank)), full[name])) for name, rank in ranks.items()}
        return {
            name: rank if problem.cost(name, rank) < problem.cost(name, None) else None
            for name, rank in rounded.items()
        }

    factors = sorted({(k + 0.5) / max(1, rank) + 1e-9 for rank in ranks.values() for k in range(15)})
    fitting = [at(factor) for factor in factors if problem.fits(at(factor))]
    assert plan == fitting[-1] and len(fitting) < len(factors)


def test_the_weights_are_in_the_subspace_that_batches_share_most():
    """Among all planes of a space, by their angle; and among random subspaces."""
    torch.manual_seed(0)

    def projectors(size, rank, number):
        bases = [torch.linalg.qr(torch.randn(size, rank, dtype=torch.float64))[0] for _ in range(number)]
        return torch.stack([basis @ basis.mT for basis in bases])

    lines = projectors(2, 1, 3)
    _, vectors = leading_subspace(lines.sum(0))
    angles = torch.linspace(0, math.pi, 100_001, dtype=torch.float64)
    directions = torch.stack([angles.cos(), angles.sin()])
    shared = torch.einsum("da,nde,ea->a", directions, lines, directions)
    best = directions[:, shared.argmax()]
    assert abs(best @ vectors[:, 0]) == pytest.approx(1, abs=1e-8)

    spaces = projectors(6, 3, 4)
    values, vectors = leading_subspace(spaces.sum(0))

    def shared_with(basis):
        return torch.einsum("dk,nde,ek->", basis, spaces, basis)

    most = shared_with(vectors[:, :3])
    torch.testing.assert_close(most, values[:3].sum())
    others = [torch.linalg.qr(torch.randn(6, 3, dtype=torch.float64))[0] for _ in range(2000)]
    near = [torch.linalg.qr(vectors[:, :3] + 0.01 * other)[0] for other in others]
    assert max(map(shared_with, others + near)) < most


def test_a_layer_of_one_batch_has_the_best_outputs_of_its_rank():
    """The first layer sees the data as they are: by Eckart and Young's theorem no outputs of its rank are nearer."""
    problem = make_problem(calibration=image_batches([16]))
    result = DobiSVDSearch(num_epochs=1).allocate(problem)
    rank, weight = result.plan["grid"], problem.layers["grid"].weight.detach()
    seen = []
    handle = problem.layers["grid"].register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, -2)))
    problem.model(image_batches([16])[0][0])
    handle.remove()
    outputs = seen[0] @ weight.mT
    left, right = result.decompositions["grid"].truncate(rank)
    error = (seen[0] @ (left @ right).mT - outputs).square().sum()
    torch.testing.assert_close(error, torch.linalg.svdvals(outputs)[rank:].square().sum())


def test_the_decompositions_are_projections_of_the_weights():
    problem = make_problem()
    result = DobiSVDSearch(num_epochs=2).allocate(problem)
    assert set(result.plan.values()) != {None} and problem.fits(result.plan)
    for name, layer in problem.layers.items():
        decomposition = result.decompositions[name]
        torch.testing.assert_close(decomposition.left @ decomposition.right, layer.weight.detach())
        if rank := result.plan[name]:
            left, right = decomposition.truncate(rank)
            torch.testing.assert_close(left.mT @ left, torch.eye(rank, dtype=torch.float64))
            torch.testing.assert_close(right, left.mT @ layer.weight.detach())


def test_the_budget_is_kept_though_every_rank_helps():
    """The penalty outweighs the loss, so the last step down to the budget is small."""
    problem = make_problem()
    search = DobiSVDSearch(num_epochs=20)
    layers = [TruncatedLayer(problem, name, search.steepness) for name in problem.layers]
    ranks, _ = search._train(problem, problem.calibration, layers)
    kept = sum(layer.cost(rank) for layer, rank in zip(layers, ranks, strict=True)) / problem.dense[0]
    assert kept.item() == pytest.approx(0.5, abs=0.05)


def test_biases_keep_the_output_of_the_mean():
    batches = image_batches([16, 16])
    options = {**UNIFORM, "estimator": "svd_llm", "ratio": 0.5, "search": DobiSVDSearch(num_epochs=2)}
    model = make_model()
    plain, fitted = (facts.compress(facts.prepare(model, batches, fit_bias=fit), **options) for fit in (False, True))
    assert plain.model.grid.bias.equal(model.grid.bias) and not fitted.model.grid.bias.equal(model.grid.bias)


def test_a_training_that_diverges_is_told():
    problem = make_problem(loss=lambda outputs, targets: outputs.sum() * math.nan)
    with pytest.raises(ValueError, match="at its ranks is NaN or infinite"):
        DobiSVDSearch(num_epochs=1).allocate(problem)
