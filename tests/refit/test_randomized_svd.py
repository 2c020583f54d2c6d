"""The randomised SVD against the exact one, and against `torch.svd_lowrank` of the whitened weight itself."""

from types import SimpleNamespace

import pytest
import torch

import facts
from facts.decomposition.truncation import decompose
from facts.estimators.base import KroneckerFactors
from facts.refit import RandomizedSVD
from tests.networks import image_batches, make_model, relative_error
from tests.oracles.truncation import discarded_energies, metric_error, symmetric_root

D_OUT, D_IN = 9, 12


@pytest.fixture
def problem():
    """A weight, the two sides of its metric, and the decomposition."""
    torch.manual_seed(0)
    weight = torch.randn(D_OUT, D_IN, dtype=torch.float64)
    A, B = (x.T @ x for x in (torch.randn(20, size, dtype=torch.float64) for size in (D_IN, D_OUT)))
    return weight, A, B, decompose(weight, KroneckerFactors(A=A, B=B))


def randomized(decomposition, rank, **options):
    """What is left of the weight at a rank."""
    work = SimpleNamespace(decompositions={"layer": decomposition}, plan={"layer": rank})
    left, right = RandomizedSVD(**options).refitted(work, ["layer"])["layer"].truncate(rank)
    return left @ right


def test_at_full_rank_it_is_the_weight(problem):
    weight, _, _, decomposition = problem
    assert relative_error(randomized(decomposition, D_OUT), weight) < 1e-12  # rounding


def test_many_iterations_come_to_the_exact_truncation(problem):
    weight, A, B, decomposition = problem
    for rank in range(1, D_OUT):
        found = randomized(decomposition, rank, num_iterations=3000)
        error = metric_error(weight - found, A, B)
        torch.testing.assert_close(error, discarded_energies(weight, A, B)[rank - 1])


def test_its_error_is_never_below_that_of_the_exact_truncation_and_mostly_above(problem):
    weight, A, B, decomposition = problem
    for rank in range(1, D_OUT):
        exact = discarded_energies(weight, A, B)[rank - 1]
        errors = [metric_error(weight - randomized(decomposition, rank, seed=seed), A, B) for seed in range(5)]
        assert min(errors) > exact * (1 - 1e-9) and max(errors) > exact * (1 + 1e-6)  # rounding; a real loss


@pytest.mark.parametrize("num_iterations", [0, 2])
def test_it_is_as_far_off_as_the_same_of_the_whitened_weight(problem, num_iterations):
    """Mean error of 400 draws, of either kind, with symmetric roots for those of the oracle."""
    weight, A, B, decomposition = problem
    whitened = symmetric_root(B) @ weight @ symmetric_root(A)
    for rank in (1, 4, 7):
        ours, theirs = [], []
        for seed in range(400):
            found = randomized(decomposition, rank, num_iterations=num_iterations, seed=seed)
            ours.append(metric_error(weight - found, A, B))
            u, s, v = torch.svd_lowrank(whitened, q=rank, niter=num_iterations)
            theirs.append((whitened - u * s @ v.T).square().sum())
        ours, theirs = torch.stack(ours), torch.stack(theirs)
        spread = ((ours.var() + theirs.var()) / 400).sqrt()
        assert abs(ours.mean() - theirs.mean()) < 4 * spread  # standard errors


@pytest.mark.parametrize("shape", [(9, 12), (12, 9)])
def test_it_projects_the_side_that_pytorch_projects(shape):
    """A weight W becomes W P or P W, P the projection onto the rows or columns of what is left."""
    weight = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.svd_lowrank(weight, q=4)
    ours = randomized(decompose(weight, KroneckerFactors()), 4)
    for found in (u * s @ v.T, ours):
        inverse = torch.linalg.pinv(found, rtol=1e-9)
        errors = [relative_error(each, found) for each in (weight @ inverse @ found, found @ inverse @ weight)]
        same, other = errors if shape[0] < shape[1] else errors[::-1]
        assert same < 1e-9 < 1e-3 < other  # rounding; a real difference


def test_directions_that_a_root_drops_stay_out(problem):
    weight, A, _, _ = problem
    A[:, :3] = A[:3] = 0
    decomposition = decompose(weight, KroneckerFactors(A=A, repair=None))
    for rank in (2, D_OUT):
        found = randomized(decomposition, rank)
        assert found.isfinite().all() and not found[:, :3].any()


def test_a_rank_without_energy_is_nothing():
    decomposition = decompose(torch.zeros(4, 5), KroneckerFactors(A=torch.eye(5)))
    assert not randomized(decomposition, 2).any()


def test_draws_are_repeatable_and_those_of_another_seed_differ():
    model, batches = make_model(), image_batches([6, 4])
    options = {"estimator": "asvd", "search": "uniform", "form": "plain", "ratio": 0.5}
    first, again, other = (
        facts.compress(model, batches, refit=RandomizedSVD(seed=seed), **options).model(batches[0][0])
        for seed in (0, 0, 1)
    )
    assert first.equal(again) and not first.equal(other)


def test_it_needs_no_data():
    model = make_model()
    result = facts.compress(
        model, estimator="pela", refit="randomized_svd", search="uniform", cost="params", form="plain", ratio=0.5
    )
    rank, weight = result.plan["tokens"], model.tokens.weight.detach()
    left, right = (factor.detach() for factor in result.model.tokens.factors())
    exact = discarded_energies(weight, None, None)[rank - 1]
    assert exact < metric_error(weight - left @ right, None, None) < weight.square().sum()


def test_biases_are_fitted_to_its_factors():
    model, batches = make_model(), image_batches([6, 4])
    prepared = facts.prepare(model, batches, layers=["grid"], fit_bias=True)
    options = {"estimator": "svd_llm", "search": "uniform", "form": "plain", "ratio": 0.5}
    result = facts.compress(prepared, refit="randomized_svd", **options)
    mean = torch.cat([model.patch_embed(x).permute(0, 2, 3, 1).flatten(0, 2) for x, _ in batches]).mean(dim=0)
    torch.testing.assert_close(result.model.grid(mean), model.grid(mean))
