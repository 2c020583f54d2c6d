import pytest
import torch

from facts.moments.batch import MIN_BLOCKED_SIZE, add_symmetric, mirror
from tests.networks import relative_error


@pytest.mark.parametrize("size", [7, MIN_BLOCKED_SIZE, 1029])
def test_blocked_product_is_the_plain_product(size):
    left = torch.randn(3, 5, size, dtype=torch.float64)
    right = torch.rand(3, 5, 1, dtype=torch.float64) * left  # leftᵀ right is symmetric
    start = torch.randn(size, size, dtype=torch.float64)
    start = start + start.T
    total = start.clone()
    add_symmetric(total, left, right)
    expected = start + torch.einsum("nti,ntj->ij", left, right)
    assert relative_error(mirror(total), expected) < 1e-13  # float64 sums in another order
