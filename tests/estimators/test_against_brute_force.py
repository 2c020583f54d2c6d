"""Every estimator equals its formula on per-sample gradients, and has the two properties that it claims."""

from itertools import product

import pytest
import torch

import facts
from facts.estimators import ESTIMATORS, GFWSVD, KroneckerFactors
from facts.moments import collect_moments
from facts.moments.losses import summed_cross_entropy
from facts.parts.layers import select_layers
from tests.by_sample import BY_SAMPLE, assert_same_factors
from tests.networks import image_batches, make_convnext, make_model, make_swin, relative_error
from tests.oracles.factors import ORACLES
from tests.oracles.samples import model_samples, tensor_samples

# Shapes of inputs, and the features that the layer gives.
TENSORS = {"tokens": ((5, 4, 5), 3), "grid": ((4, 2, 3, 3), 6), "windows": ((3, 2, 4, 4), 4), "vectors": ((6, 5), 3)}
NETWORKS = {
    "every_shape": (make_model, (3, 8, 8)),
    "swin": (make_swin, (3, 16, 16)),
    "convnext": (make_convnext, (3, 32, 32)),
}
NORMALIZED = [{"grad_clip": clip, "normalize": norm} for clip in (None, "median", 0.3) for norm in ("none", "batch")]
assert ESTIMATORS.keys() == ORACLES.keys(), "each estimator has a reference in ORACLES of tests/oracles/factors.py"
OPTIONS = [
    *((name, {}) for name in ESTIMATORS),
    *product(("facts", "shampoo2"), NORMALIZED),
    *product(("kfac_expand", "kfac_reduce"), ({"grad_clip": None}, {"grad_clip": 0.3})),
    *product(["gfwsvd"], ({"group_size": 1}, {"group_size": 3})),
    *product(["asvd"], ({"statistic": "max"}, {"alpha": 1.0})),
    ("fwsvd", {"exponent": 0.5}),
]
NAMED = {f"{name} {options or ''}".strip(): (name, options) for name, options in OPTIONS}
VARIANTS = {key: (ESTIMATORS[name](**options), ORACLES[name], options) for key, (name, options) in NAMED.items()}
variants = pytest.mark.parametrize("variant", VARIANTS)


@pytest.mark.parametrize(("shape", "d_out"), TENSORS.values(), ids=TENSORS)
@variants
def test_factors_of_tensors(variant, shape, d_out):
    estimator, oracle, options = VARIANTS[variant]
    inputs = torch.randn(shape, dtype=torch.float64)
    grads = torch.randn(*shape[:-1], d_out, dtype=torch.float64)
    if len(shape) == 2:  # estimate_factors reads [N, T, d]
        inputs, grads = inputs[:, None], grads[:, None]
    place, expected = (variant, ""), KroneckerFactors(*oracle([tensor_samples(inputs, grads)], **options))
    assert_same_factors({place: facts.estimate_factors(estimator, inputs, grads)}, {place: expected})


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
    expected = {(variant, layer): KroneckerFactors(*oracle(samples[layer], **options)) for layer in moments}
    assert_same_factors({(variant, layer): estimator.factors(values) for layer, values in moments.items()}, expected)


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
    place, expected = (name, ""), KroneckerFactors(*ORACLES[name]([tensor_samples(inputs, clipped)], grad_clip=None))
    found = facts.estimate_factors(ESTIMATORS[name](grad_clip="tokens"), inputs, grads)
    assert_same_factors({place: found}, {place: expected})


def are_same(name, x, g, other_x, other_g):
    estimator = GFWSVD(group_size=1) if name == "gfwsvd" else BY_SAMPLE[name]
    pair = facts.estimate_factors(estimator, x, g), facts.estimate_factors(estimator, other_x, other_g)
    sides = [[getattr(factors, side) / getattr(factors, side).norm() for factors in pair] for side in "AB"]
    return all(relative_error(one, other) < 1e-12 for one, other in sides)


@pytest.mark.parametrize("name", [name for name, each in ESTIMATORS.items() if each.token_local is not None])
def test_a_token_local_estimator_sees_no_samples_and_a_coupling_one_whose_gradient_it_is(name):
    """The first does not see which tokens belong together, the second which gradient to which activation."""
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    g = x @ torch.randn(3, 5, dtype=torch.float64) * x[..., :1]
    assert are_same(name, x, g, x.reshape(24, 1, 3), g.reshape(24, 1, 5)) == ESTIMATORS[name].token_local
    assert are_same(name, x, g, x, g[torch.tensor([3, 0, 5, 1, 2, 4])]) != ESTIMATORS[name].couples
