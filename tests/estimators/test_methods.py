"""KFAC against curvlinops, FLAR's shrinkage against scikit-learn, FACTS with several power iterations."""

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.covariance import ledoit_wolf_shrinkage
from torch import nn

import facts
from facts.estimators import FACTS, FLAR, KFACExpand, KFACReduce
from facts.estimators.base import see_data
from facts.moments import LiteralShrunkGram, collect_moments
from facts.moments.batch import LayerBatch
from facts.moments.losses import summed_cross_entropy
from facts.parts.layers import select_layers
from tests.networks import LAYERS, image_batches, make_convnext, make_model, make_vit, relative_error
from tests.oracles.factors import clipped
from tests.oracles.fisher import dense_token_local, rearranged
from tests.oracles.samples import model_samples, tensor_samples


@pytest.mark.parametrize(
    ("approximation", "estimator"), [("expand", KFACExpand(grad_clip=None)), ("reduce", KFACReduce(grad_clip=None))]
)
@pytest.mark.parametrize(("make", "shape"), [(make_vit, (3, 16, 16)), (make_convnext, (3, 32, 32))])
def test_factors_are_curvlinops_up_to_a_constant(make, shape, approximation, estimator):
    from curvlinops import KFACLinearOperator  # here, for it takes seconds

    model = make().eval()
    batches = image_batches([3, 3, 1], shape=shape)
    layers = select_layers(model).layers
    options = {"fisher_type": "empirical", "kfac_approx": approximation, "check_deterministic": False}
    own = [layer.weight for layer in layers.values()]
    operator = KFACLinearOperator(model, nn.CrossEntropyLoss(), own, batches, **options)
    operator.compute_kronecker_factors()
    theirs = operator.state_dict()
    moments = collect_moments(model, layers, batches, estimator.moments)
    for name in layers:
        factors = estimator.factors(moments[name])
        A, B = theirs["input_covariances"][name], theirs["gradient_covariances"][name]
        assert relative_error(factors.A, A) < 1e-12  # float64 sums in another order
        assert relative_error(factors.B / factors.B.trace(), B / B.trace()) < 1e-12


@pytest.mark.parametrize("stretch", [1.0, 30.0])
def test_ledoit_wolf_amount_is_scikit_learns(model, batches, stretch):
    """`stretch` makes the spectrum uneven, so that little shrinkage is asked for as well as much."""
    batches = [(images * torch.linspace(1, stretch, 8, dtype=images.dtype), labels) for images, labels in batches]
    layers, estimator = select_layers(model).layers, FLAR()
    moments = collect_moments(model, layers, batches, estimator.moments)
    samples = model_samples(model, batches, summed_cross_entropy)
    amounts = []
    for name in layers:
        X = torch.cat([sample.X for batch in samples[name] for sample in batch])
        row, col = estimator.shrinkage(moments[name])
        expected = ledoit_wolf_shrinkage(X.numpy(), assume_centered=True)
        assert row == 0
        assert col == pytest.approx(expected, rel=1e-9)  # sums of fourth powers against products of matrices
        amounts.append(col)
    assert max(amounts) > 0.01 > min(amounts)


def literal(x):
    batch = LayerBatch(x, None)
    moment = LiteralShrunkGram()
    total = moment.init_state("layer", batch.x, x.shape[-1], 1)
    moment.add(total, batch)
    return moment.finalize(total)[0]


def published_rule(gram):
    """The rule word for word, in NumPy: a float64 Gram matrix beside a float32 multiple of the identity."""
    gram = gram.numpy()
    target = np.float32(np.trace(gram) / len(gram)) * np.eye(len(gram), dtype=np.float32)
    rounding = np.trace(gram) - np.trace(target, dtype=np.float32)
    amount = np.clip(1e10 * rounding / np.square(gram - target).sum(), 0, 1)
    return amount, (1 - amount) * gram + amount * target


def test_literal_amount_is_the_rounding_error_of_float32():
    """Anywhere in 0 to 1, and often an end of it: 1e10 times a rounding error of either sign, clipped."""
    amounts = []
    for _ in range(200):
        x = torch.randn(4, 6, 5, dtype=torch.float64)
        amount, expected = published_rule(torch.einsum("nti,ntj->ij", x, x) / 4)
        assert relative_error(literal(x), torch.from_numpy(expected)) < 1e-12
        amounts.append(amount)
    assert {0.0, 1.0} <= set(amounts)


EXACT = 1e-12  # float64 sums in another order
PLAIN = {"grad_clip": None, "normalize": "none"}


def literal_iterations(batches, number, grad_clip="median", normalize="batch"):
    """Loops over samples and tokens; both factors of a step come from those of the step before."""
    samples = [sample for batch in batches for sample in batch]
    d_out, d_in = samples[0].D.shape
    A, B = torch.eye(d_in, dtype=torch.float64), torch.eye(d_out, dtype=torch.float64)
    for _ in range(number):
        next_A, next_B = 0, 0
        for batch in clipped(batches, grad_clip):
            batch_A = 0
            for sample in batch:
                for x, g in zip(sample.X, sample.G, strict=True):
                    batch_A = batch_A + (g @ B @ g) * torch.outer(x, x)
                    next_B = next_B + (x @ A @ x) * torch.outer(g, g)
            next_A = next_A + (batch_A / batch_A.trace() if normalize == "batch" else batch_A)
        A, B = next_A, next_B
    return A / A.trace(), B / B.trace()


@pytest.mark.parametrize("options", [{}, PLAIN, {"grad_clip": 0.3}])
def test_factors_of_a_network_are_those_of_the_loops(options):
    model, batches = make_model(), image_batches([3, 3, 1])
    layers = select_layers(model).layers
    collect = partial(collect_moments, model, layers, batches)
    estimator, moments = see_data(FACTS(num_iterations=3, **options), collect)
    samples = model_samples(model, batches, summed_cross_entropy)
    for layer in LAYERS:
        found, expected = estimator.factors(moments[layer]), literal_iterations(samples[layer], 3, **options)
        for actual, literal in zip((found.A, found.B), expected, strict=True):
            assert relative_error(actual / actual.trace(), literal) < EXACT


def test_they_converge_to_the_nearest_kronecker_product_of_the_token_local_fisher():
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    g = torch.randn(6, 4, 5, dtype=torch.float64) * torch.rand(6, 4, 1)
    local = dense_token_local(tensor_samples(x, g))
    u, _, vh = torch.linalg.svd(rearranged(local, 3, 5))
    factors = facts.estimate_factors(FACTS(num_iterations=60, **PLAIN), x, g)
    for factor, vector in ((factors.A, u[:, 0]), (factors.B, vh[0])):
        cosine = (factor.flatten() @ vector).abs() / factor.norm()
        assert cosine.item() == pytest.approx(1, abs=1e-10)


@pytest.mark.parametrize("options", [PLAIN, {}, {"grad_clip": 0.3}])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_the_product_keeps_the_trace_of_the_token_local_fisher(number, options):
    """Clipped or not: searches compare layers by it."""
    x, g = torch.randn(6, 4, 3, dtype=torch.float64), torch.randn(6, 4, 5, dtype=torch.float64)
    factors = facts.estimate_factors(FACTS(num_iterations=number, **options), x, g)
    trace = dense_token_local(tensor_samples(x, g)).trace()
    assert (factors.A.trace() * factors.B.trace()).item() == pytest.approx(trace.item())


def test_shrinkage_is_that_of_the_first_step():
    model, batches = make_model(), image_batches([4])
    options = {"num_iterations": 2, "shrinkage_row": 1.0, "shrinkage_col": 1.0}
    (shrunk,) = facts.prepare(model, batches, layers=["tokens"]).decompositions(FACTS(**options)).values()
    left, right = shrunk.truncate(3)
    u, s, vh = torch.linalg.svd(model.tokens.weight.detach())
    plain = u[:, :3] @ torch.diag(s[:3]) @ vh[:3]
    assert relative_error(left @ right, plain) < EXACT
