"""Singular values by eigenvectors of the Gram matrix, against LAPACK's."""

from unittest.mock import patch

import pytest
import torch

from facts.decomposition.truncation import by_gram, decompose
from facts.estimators import KroneckerFactors
from facts.utils.numerics import solved
from tests.devices.pretended import pretended_cuda

SHAPES = [(12, 30), (30, 12), (20, 20), (1, 5)]


def falling(rows: int, columns: int, decades: float) -> torch.Tensor:
    """A matrix whose singular values fall by so many powers of ten."""
    generator = torch.Generator().manual_seed(rows)
    rank = min(rows, columns)
    left, right = (
        torch.linalg.qr(torch.randn(size, rank, generator=generator, dtype=torch.float64)).Q for size in (rows, columns)
    )
    return left * torch.logspace(0, -decades, rank, dtype=torch.float64) @ right.T


@pytest.mark.parametrize("decades", [0.5, 3, 7, 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_product_and_energies_are_those_of_the_svd(shape, decades):
    """To 1e-9 of the whole energy, as the squares of a float64 matrix allow; every truncation is as good."""
    matrix = falling(*shape, decades)
    u, s, vh = by_gram(matrix)
    expected = torch.linalg.svdvals(matrix)
    torch.testing.assert_close(u * s @ vh, matrix, rtol=0, atol=1e-12)
    torch.testing.assert_close(s.square(), expected.square(), rtol=0, atol=1e-9)
    assert (s.diff() <= 0).all()
    for rank in range(1, len(s) + 1):
        lost = (matrix - u[:, :rank] * s[:rank] @ vh[:rank]).square().sum()
        torch.testing.assert_close(lost, expected[rank:].square().sum(), rtol=0, atol=1e-9)


def test_a_matrix_of_zeros_has_finite_vectors():
    u, s, vh = by_gram(torch.zeros(4, 3, dtype=torch.float64))
    assert not s.any() and u.isfinite().all() and vh.isfinite().all()


def fails(matrix):
    raise torch.linalg.LinAlgError("the algorithm failed to converge")


def is_nan(matrix):
    return matrix * torch.nan


@pytest.mark.parametrize("on_gpu", [fails, is_nan])
@pytest.mark.parametrize("solver", [torch.linalg.eigvalsh, torch.linalg.eigh])
def test_the_cpu_solves_what_a_gpu_does_not(solver, on_gpu):
    matrix = torch.diag(torch.tensor([2.0, 1.0, 1.0]))
    with pretended_cuda():
        found = solved(lambda each: on_gpu(each) if each.is_cuda else solver(each), matrix.cuda())
        values = found if isinstance(found, torch.Tensor) else found[0]
        assert values.is_cuda and values.tolist() == [1, 1, 2]


@pytest.mark.parametrize("solver", [torch.linalg.eigh, fails, is_nan])
def test_what_no_device_solves_is_an_error(solver):
    with pytest.raises(torch.linalg.LinAlgError):
        solved(solver, torch.full((64, 64), torch.nan))


def test_a_gpu_takes_the_gram_matrix_and_finds_the_same_layer():
    weight, inputs = falling(16, 24, 2).float(), torch.eye(24, dtype=torch.float64) + 0.3
    here = decompose(weight, KroneckerFactors(A=inputs, B=None))
    with pretended_cuda(), patch("torch.linalg.svd", side_effect=AssertionError("slow there")):
        there = decompose(weight.cuda(), KroneckerFactors(A=inputs.cuda(), B=None))
        left, right, energies = there.left.cpu(), there.right.cpu(), there.energies.cpu()
    for rank in (1, 5, 16):
        torch.testing.assert_close(left[:, :rank] @ right[:rank], torch.matmul(*here.truncate(rank)), rtol=0, atol=1e-6)
    torch.testing.assert_close(energies, here.energies, rtol=1e-9, atol=1e-12)
