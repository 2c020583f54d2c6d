import pytest
import torch

from facts.moments import SampleGradEnergy, SampleGradGrams
from facts.moments.batch import MIN_BLOCKED_SIZE, LayerBatch, add_symmetric, mirror
from tests.networks import relative_error

FEW_TOKENS, MANY_TOKENS = (2, 2, 16, 12), (2, 60, 5, 4)  # [N, T, n, m]


@pytest.mark.parametrize("moment", [SampleGradGrams(), SampleGradEnergy()])
@pytest.mark.parametrize(
    ("num_samples", "tokens", "n", "m", "through_tokens"), [(*FEW_TOKENS, True), (*MANY_TOKENS, False)]
)
def test_both_routes_give_the_same(moment, num_samples, tokens, n, m, through_tokens):
    x = torch.randn(num_samples, tokens, n, dtype=torch.float64)
    g = torch.randn(num_samples, tokens, m, dtype=torch.float64)
    assert LayerBatch(x, g).tokens_are_cheaper is through_tokens

    totals = []
    for route in (True, False):
        batch = LayerBatch(x, g)
        batch.tokens_are_cheaper = route
        total = moment.init_state("layer", x, n, m)
        moment.add(total, batch)
        totals.append(moment.finalize(total))
    for left, right in zip(*totals, strict=True):
        assert relative_error(left, right) < 1e-13  # float64 sums in another order


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
