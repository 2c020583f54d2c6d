import torch
from hypothesis import given
from hypothesis import strategies as st

import facts
from facts.estimators import ESTIMATORS
from facts.moments import GroupGradients
from facts.moments.batch import LayerBatch
from tests.networks import relative_error

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
            # The Lanczos vectors of GFWSVD are exact to 1e-9; all others are sums of squares, less the mean's in AAFM.
            scale = factor.trace() if name != "aafm" else inputs.square().sum()
            assert torch.linalg.eigvalsh(factor)[0] >= -1e-8 * scale
            assert factor.trace() > 0 or (name, num_samples * tokens) == ("aafm", 1)


@given(num_samples=sizes, d_in=sizes, d_out=sizes)
def test_expand_equals_reduce_at_one_token(num_samples, d_in, d_out):
    inputs, grads = tensors(num_samples, 1, d_in, d_out)
    expand, reduce = (facts.estimate_factors(name, inputs, grads) for name in ("kfac_expand", "kfac_reduce"))
    assert relative_error(expand.A, reduce.A) < 1e-14
    assert relative_error(expand.B, reduce.B) < 1e-14


def test_further_axes_are_tokens():
    inputs, grads = tensors(3, 12, 5, 4)
    for name in ESTIMATORS:
        flat = facts.estimate_factors(name, inputs, grads)
        grid = facts.estimate_factors(name, inputs.reshape(3, 2, 2, 3, 5), grads.reshape(3, 2, 2, 3, 4))
        for side in ("A", "B"):
            left, right = getattr(flat, side), getattr(grid, side)
            assert left is right is None or left.equal(right)


def test_group_gradients_are_means_of_samples_in_order(tmp_path):
    inputs, grads = tensors(7, 3, 5, 4)
    moment = GroupGradients(group_size=3)
    total = moment.init_state("layer", inputs, 5, 4, tmp_path / "layer")
    for part in (slice(0, 2), slice(2, 7)):
        moment.add(total, LayerBatch(inputs[part], grads[part], first_sample=part.start))
    (stored,) = moment.finalize(total).chunks()
    expected = torch.stack(
        [
            torch.einsum("kti,ktj->ij", grads[p], inputs[p]) / len(inputs[p])
            for p in (slice(3), slice(3, 6), slice(6, 7))
        ]
    )
    torch.testing.assert_close(stored, expected)
