import math

import pytest
import torch
from torch import nn

import facts
from facts.decomposition.truncation import decompose
from facts.estimators import ESTIMATORS, GFWSVD, KroneckerFactors
from facts.estimators.whitening import shrink
from tests.networks import relative_error
from tests.oracles.truncation import discarded_energies, metric_error

# Roots and their inverses in float64 lose what the factor's condition number (1e4 here at most) takes from 1e-16.
EXACT = 1e-9
ROW, COL = 0.7, 0.1


def random_factor(size):
    vectors = torch.randn(3 * size, size, dtype=torch.float64) * torch.linspace(0.1, 3, size, dtype=torch.float64)
    return vectors.T @ vectors / len(vectors)


def estimated(name, m=6, n=8):
    inputs = torch.randn(12, 5, n, dtype=torch.float64) @ random_factor(n)
    grads = torch.randn(12, 5, m, dtype=torch.float64) @ random_factor(m)
    # GFWSVD's factors have full rank only where there are several groups.
    estimator = GFWSVD(group_size=1) if name == "gfwsvd" else name
    return facts.estimate_factors(estimator, inputs, grads)


def shrunk(factor, amount):
    return None if factor is None else shrink(factor, amount)


@pytest.mark.parametrize("amounts", [(ROW, COL), (0.0, 0.02)])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_truncation_error_is_the_discarded_energy(name, amounts):
    """In the (A, B) metric, at every rank, measured with symmetric roots."""
    weight, factors = torch.randn(6, 8, dtype=torch.float64), estimated(name)
    row, col = amounts
    A, B = shrunk(factors.A, col), shrunk(factors.B, row)
    expected = discarded_energies(weight, A, B)
    energies = decompose(weight, factors, shrinkage_row=row, shrinkage_col=col).energies
    tolerance = EXACT * float(energies.sum())
    torch.testing.assert_close(energies.sum() - energies.cumsum(dim=0), expected, rtol=0, atol=tolerance)
    for rank in range(1, 7):
        left, right = facts.low_rank_factors(weight, factors, rank, shrinkage_row=row, shrinkage_col=col)
        assert left.shape == (6, rank)
        assert right.shape == (rank, 8)
        error = metric_error(weight - left @ right, A, B)
        assert float(error) == pytest.approx(float(expected[rank - 1]), abs=tolerance)


@pytest.mark.parametrize("shape", [(6, 8), (8, 6)])
@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_svd_llm_v2_loses_least_on_fewer_tokens_than_inputs(shape, tokens):
    """The outputs are those of the best approximation of rank k; inputs that never occurred give nothing."""
    weight = torch.randn(shape, dtype=torch.float64)
    inputs, grads = (torch.randn(1, tokens, size, dtype=torch.float64) for size in reversed(shape))
    decomposition = decompose(weight, facts.estimate_factors("svd_llm_v2", inputs, grads))
    assert decomposition.num_repaired == 1
    x = inputs[0].T  # [d_in, tokens]
    energies = torch.linalg.svdvals(weight @ x).square()
    nowhere = torch.linalg.svd(x).U[:, tokens:]
    for rank in range(1, 7):
        approximation = torch.mm(*decomposition.truncate(rank))
        lost = ((weight - approximation) @ x).square().sum()
        torch.testing.assert_close(lost, energies[rank:].sum(), rtol=0, atol=EXACT * float(energies.sum()))
        assert (approximation @ nowhere).norm() < EXACT * weight.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_float64_inside_and_the_type_of_the_weight_outside(dtype):
    weight = torch.randn(6, 8).to(dtype)
    left, right = facts.low_rank_factors(weight, KroneckerFactors(A=random_factor(8).float()), 6)
    assert left.dtype == right.dtype == dtype
    # Two roundings to the weight's type, or the condition number of A in float64.
    assert relative_error(left.double() @ right.double(), weight.double()) < max(4 * torch.finfo(dtype).eps, EXACT)


@pytest.mark.parametrize("rank", [0, -1, 7])
def test_rank_out_of_range(rank):
    with pytest.raises(ValueError, match=rf"rank must be from 1 to 6 for this layer, got {rank}"):
        facts.low_rank_factors(torch.randn(6, 8), KroneckerFactors(), rank)


@pytest.mark.parametrize("value", [math.inf, math.nan, 1j])
def test_a_weight_that_is_no_number(value):
    """By a method without data, whose passes would find it."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Linear(8, 4)).double()
    weight = model[1].weight.detach().to(torch.complex128 if isinstance(value, complex) else torch.float64)
    weight[0, 0] = value
    model[1].weight = nn.Parameter(weight)
    with pytest.raises(ValueError, match="layer 1 cannot be decomposed by PELA: its weight is complex, or holds NaN"):
        facts.compress(model, estimator="pela", layers=["1"], ratio=0.5)
