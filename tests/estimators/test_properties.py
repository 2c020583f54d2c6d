import torch
from hypothesis import given
from hypothesis import strategies as st

import facts
from facts.estimators import ESTIMATORS

sizes = st.integers(1, 6)


def tensors(num_samples, tokens, d_in, d_out):
    return (torch.randn(num_samples, tokens, size, dtype=torch.float64) for size in (d_in, d_out))


@given(num_samples=sizes, tokens=sizes, d_in=sizes, d_out=sizes, name=st.sampled_from(list(ESTIMATORS)))
def test_factors_are_symmetric_and_positive_semi_definite(num_samples, tokens, d_in, d_out, name):
    inputs, grads = tensors(num_samples, tokens, d_in, d_out)
    factors = facts.estimate_factors(name, inputs, grads)
    for factor, size in ((factors.A, d_in), (factors.B, d_out)):
        if factor is not None:
            assert factor.shape == (size, size)
            assert factor.equal(factor.T)
            # The Lanczos vectors of GFWSVD are exact to 1e-9; all others are sums of squares.
            assert torch.linalg.eigvalsh(factor)[0] >= -1e-8 * factor.trace()
            assert factor.trace() > 0
