"""Every estimator equals its formula on per-sample gradients, from tensors and through a network."""

import pytest
import torch

import facts
from facts.estimators import ASVD, ESTIMATORS, FACTS, FWSVD, GFWSVD, KFACExpand, KFACReduce, Shampoo2
from facts.moments import collect_moments
from facts.moments.losses import summed_cross_entropy
from facts.parts.layers import select_layers
from tests.networks import image_batches, make_convnext, make_model, make_swin, relative_error
from tests.oracles.factors import ORACLES
from tests.oracles.samples import model_samples, tensor_samples

# Float64 sums in another order differ by some 1e-15; cancellation in tiny sums costs a few digits.
EXACT = 1e-12
# The iteration stops at a step of 1e-8; the gap to the second pair decides how far the limit is.
ITERATED = 1e-7

# Shapes of inputs, and the features that the layer gives.
TENSORS = {"tokens": ((5, 4, 5), 3), "grid": ((4, 2, 3, 3), 6), "windows": ((3, 2, 4, 4), 4), "vectors": ((6, 5), 3)}
NETWORKS = {
    "every_shape": (make_model, (3, 8, 8)),
    "swin": (make_swin, (3, 16, 16)),
    "convnext": (make_convnext, (3, 32, 32)),
}
CLIPPED = [{"grad_clip": None}, {"grad_clip": 0.3}]
NORMALIZED = [
    {"grad_clip": grad_clip, "normalize": normalize}
    for grad_clip in (None, "median", 0.3)
    for normalize in ("none", "batch")
]
assert ESTIMATORS.keys() == ORACLES.keys(), "each estimator has a reference in ORACLES of tests/oracles/factors.py"
VARIANTS = {
    **{name: (estimator(), ORACLES[name], {}) for name, estimator in ESTIMATORS.items()},
    **{
        f"{name} {' '.join(f'{field} {value}' for field, value in options.items())}": (
            estimator(**options),
            ORACLES[name],
            options,
        )
        for name, estimator, every in (
            ("facts", FACTS, NORMALIZED),
            ("shampoo2", Shampoo2, NORMALIZED),
            ("kfac_expand", KFACExpand, CLIPPED),
            ("kfac_reduce", KFACReduce, CLIPPED),
        )
        for options in every
    },
    "gfwsvd groups of 1": (GFWSVD(group_size=1), ORACLES["gfwsvd"], {"group_size": 1}),
    "gfwsvd groups of 3": (GFWSVD(group_size=3), ORACLES["gfwsvd"], {"group_size": 3}),
    "asvd max": (ASVD(statistic="max"), ORACLES["asvd"], {"statistic": "max"}),
    "asvd alpha": (ASVD(alpha=1.0), ORACLES["asvd"], {"alpha": 1.0}),
    "fwsvd exponent": (FWSVD(exponent=0.5), ORACLES["fwsvd"], {"exponent": 0.5}),
}
variants = pytest.mark.parametrize("variant", VARIANTS)


def assert_same_factors(actual, expected, variant):
    tolerance = ITERATED if "gfwsvd" in variant else EXACT
    for side, (ours, literal) in zip("AB", zip((actual.A, actual.B), expected, strict=True), strict=True):
        assert (ours is None) == (literal is None), side
        if literal is not None:
            assert relative_error(ours, literal) < tolerance, side


@pytest.mark.parametrize(("shape", "d_out"), TENSORS.values(), ids=TENSORS)
@variants
def test_factors_of_tensors(variant, shape, d_out):
    estimator, oracle, options = VARIANTS[variant]
    inputs = torch.randn(shape, dtype=torch.float64)
    grads = torch.randn(*shape[:-1], d_out, dtype=torch.float64)
    if len(shape) == 2:  # estimate_factors reads [N, T, d]
        inputs, grads = inputs[:, None], grads[:, None]
    expected = oracle([tensor_samples(inputs, grads)], **options)
    assert_same_factors(facts.estimate_factors(estimator, inputs, grads), expected, variant)


@pytest.fixture(scope="module", params=NETWORKS)
def passed(request):
    """One pass for the union of all variants over seven samples in batches of 3, 3 and 1, and every sample alone."""
    make, shape = NETWORKS[request.param]
    model = make().eval()
    batches = image_batches([3, 3, 1], shape=shape)
    layers = select_layers(model).layers
    moments = [moment for estimator, _, _ in VARIANTS.values() for moment in estimator.moments]
    return collect_moments(model, layers, batches, moments), model_samples(model, batches, summed_cross_entropy)


@variants
def test_factors_through_a_network(passed, variant):
    moments, samples = passed
    estimator, oracle, options = VARIANTS[variant]
    assert moments
    for layer in moments:
        assert_same_factors(estimator.factors(moments[layer]), oracle(samples[layer], **options), variant)


@pytest.mark.parametrize("name", ["facts", "kfac_expand", "kfac_reduce", "shampoo2"])
def test_tokens_are_scaled_to_a_tenth_to_ten_times_the_mean_norm_in_their_sample(name):
    """A token without a gradient keeps none, and does not count in the mean."""
    inputs, grads = torch.randn(4, 30, 5, dtype=torch.float64), torch.randn(4, 30, 3, dtype=torch.float64)
    grads *= torch.logspace(-4, 3, 30, dtype=torch.float64)[:, None]
    grads[:, 7] = 0
    clipped = grads.clone()
    for sample in clipped:
        norms = [float(g.norm()) for g in sample]
        mean = sum(norms) / 29
        for g, norm in zip(sample, norms, strict=True):
            g *= min(max(norm, mean / 10), 10 * mean) / norm if norm else 1
    assert not clipped[:, :7].allclose(grads[:, :7]) and not clipped[:, 29:].allclose(grads[:, 29:])
    expected = ORACLES[name]([tensor_samples(inputs, clipped)], grad_clip=None)
    found = facts.estimate_factors(ESTIMATORS[name](grad_clip="tokens"), inputs, grads)
    assert_same_factors(found, expected, name)
