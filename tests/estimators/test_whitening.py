import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from facts.estimators.whitening import lift_spectrum, lift_spectrum_to_1e_6, raise_shrinkage, shrink, square_root
from tests.networks import relative_error


def with_spectrum(*eigenvalues):
    """A dense symmetric matrix with these eigenvalues."""
    q, _ = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), dtype=torch.float64))
    matrix = q @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ q.T
    return (matrix + matrix.T) / 2


@pytest.mark.parametrize("amount", [0.0, 0.1, 0.7, 1.0])
def test_shrinkage_is_the_papers(amount):
    matrix = with_spectrum(5, 3, 1)
    expected = (1 - amount) * matrix + amount * torch.eye(3, dtype=torch.float64) * matrix.trace() / 3
    torch.testing.assert_close(shrink(matrix, amount), expected)
    root = square_root(matrix, amount, lift_spectrum)
    torch.testing.assert_close(root.matrix @ root.matrix.T, expected)


BAD = {"singular": (4, 1, 0), "indefinite": (4, 1, -0.5), "rank one": (4, 0, 0), "nearly singular": (1, 1, -1e-17)}


@pytest.mark.parametrize("spectrum", BAD.values(), ids=BAD)
def test_bad_factors_are_marked_and_lose_directions_without_a_repair(spectrum):
    factor = with_spectrum(*spectrum)
    root = square_root(factor, 0.0, repair=None)
    kept = sum(value > 0 for value in spectrum)
    assert root.repaired
    assert torch.linalg.matrix_rank(root.matrix) == torch.linalg.matrix_rank(root.inverse) == kept
    torch.testing.assert_close(root.inverse, torch.linalg.pinv(root.matrix))
    values, vectors = torch.linalg.eigh(factor)
    torch.testing.assert_close(root.matrix @ root.matrix.T, vectors @ values.clamp(min=0).diag() @ vectors.T)


def test_rule_of_svd_llm_survives_large_factors():
    """1e-6 is below the rounding error of a factor of size 1e12; the lift is as much larger as it has to be."""
    matrix = 1e12 * with_spectrum(3, 1, -1e-3)
    root = square_root(matrix, 0.0, lift_spectrum_to_1e_6)
    assert root.repaired
    assert relative_error(root.matrix @ root.matrix.T, matrix + 1e9 * torch.eye(3, dtype=torch.float64)) < 1e-12


@pytest.mark.parametrize(("smallest", "expected"), [(-0.1, 0.2), (-0.3, 0.3), (-0.5, 0.4), (-8.0, 0.9)])
def test_rule_of_gfwsvd(smallest, expected):
    """The first of 0.2, 0.3, ... that lifts λ_min above zero: (1 - a) λ_min + a mean > 0."""
    rest = (3 - smallest) / 2  # the mean eigenvalue is 1
    matrix = with_spectrum(rest, rest, smallest)
    if expected > 0.2:
        assert torch.linalg.eigvalsh(shrink(matrix, expected - 0.1))[0] < 0
    torch.testing.assert_close(raise_shrinkage(matrix), shrink(matrix, expected))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_are_refused(value):
    factor = torch.eye(3)
    factor[1, 2] = value
    with pytest.raises(ValueError, match="the factor holds NaN or infinity"):
        square_root(factor, 0.1, lift_spectrum)


@given(
    size=st.integers(1, 12),
    rank=st.integers(1, 12),
    exponent=st.integers(-10, 10),
    repair=st.sampled_from([lift_spectrum, lift_spectrum_to_1e_6, raise_shrinkage]),
)
def test_any_gram_matrix_has_a_root(size, rank, exponent, repair):
    vectors = 10.0**exponent * torch.randn(rank, size, dtype=torch.float64)
    grams = torch.stack([vectors.T @ vectors, torch.eye(size, dtype=torch.float64)])
    root, both = square_root(grams[0], 0.0, repair), square_root(grams, 0.0, repair)
    torch.testing.assert_close(both.matrix, torch.stack([root.matrix, grams[1]]))
    assert root.matrix.isfinite().all()
    assert (root.matrix.diagonal() > 0).all()
