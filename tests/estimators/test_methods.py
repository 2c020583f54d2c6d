"""KFAC against curvlinops, FLAR's shrinkage against scikit-learn, FACTS by iteration; roots of bad factors."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.covariance import ledoit_wolf_shrinkage
from torch import nn

import facts
from facts.estimators import FACTS, FLAR, KFACExpand, KFACReduce
from facts.estimators.base import see_data
from facts.estimators.whitening import lift_spectrum, lift_spectrum_to_1e_6, raise_shrinkage, shrink, square_root
from facts.moments import LiteralShrunkGram, collect_moments
from facts.moments.batch import LayerBatch
from facts.moments.losses import summed_cross_entropy
from facts.parts.layers import select_layers
from tests.networks import LAYERS, image_batches, make_convnext, make_model, make_vit, relative_error
from tests.oracles.factors import clipped
from tests.oracles.fisher import dense_token_local, rearranged
from tests.oracles.samples import model_samples, tensor_samples

EXACT = 1e-12  # float64 sums in another order
PLAIN = {"grad_clip": None, "normalize": "none"}
BAD = {"singular": (4, 1, 0), "indefinite": (4, 1, -0.5), "rank one": (4, 0, 0), "nearly singular": (1, 1, -1e-17)}


@pytest.mark.parametrize(
    ("approximation", "estimator"), [("expand", KFACExpand(grad_clip=None)), ("reduce", KFACReduce(grad_clip=None))]
)
@pytest.mark.parametrize(("make", "shape"), [(make_vit, (3, 16, 16)), (make_convnext, (3, 32, 32))])
def test_factors_are_curvlinops_up_to_a_constant(make, shape, approximation, estimator):
    from curvlinops import KFACLinearOperator  # here, for it takes seconds

    model, batches = make().eval(), image_batches([3, 3, 1], shape=shape)
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
        assert row == 0 and col == pytest.approx(expected, rel=1e-9)  # fourth powers against products of matrices
        amounts.append(col)
    assert max(amounts) > 0.01 > min(amounts)


def published_rule(gram):
    """The rule word for word, in NumPy: a float64 Gram matrix beside a float32 multiple of the identity."""
    gram = gram.numpy()
    target = np.float32(np.trace(gram) / len(gram)) * np.eye(len(gram), dtype=np.float32)
    rounding = np.trace(gram) - np.trace(target, dtype=np.float32)
    amount = np.clip(1e10 * rounding / np.square(gram - target).sum(), 0, 1)
    return amount, (1 - amount) * gram + amount * target


def test_literal_amount_is_the_rounding_error_of_float32():
    """Anywhere in 0 to 1, and often an end of it: 1e10 times a rounding error of either sign, clipped."""
    amounts, moment = [], LiteralShrunkGram()
    for _ in range(200):
        x = torch.randn(4, 6, 5, dtype=torch.float64)
        moment.add(total := moment.init_state("layer", x, 5, 1), LayerBatch(x, None))
        amount, expected = published_rule(torch.einsum("nti,ntj->ij", x, x) / 4)
        assert relative_error(moment.finalize(total)[0], torch.from_numpy(expected)) < 1e-12
        amounts.append(amount)
    assert {0.0, 1.0} <= set(amounts)


def literal_iterations(batches, number, grad_clip="median", normalize="batch"):
    """Loops over samples and tokens; both factors of a step come from those of the step before."""
    d_out, d_in = batches[0][0].D.shape
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
    collect = partial(collect_moments, model, select_layers(model).layers, batches)
    estimator, moments = see_data(FACTS(num_iterations=3, **options), collect)
    samples = model_samples(model, batches, summed_cross_entropy)
    for layer in LAYERS:
        found, (A, B) = estimator.factors(moments[layer]), literal_iterations(samples[layer], 3, **options)
        assert relative_error(found.A / found.A.trace(), A) < EXACT
        assert relative_error(found.B / found.B.trace(), B) < EXACT


def test_they_converge_to_the_nearest_kronecker_product_of_the_token_local_fisher():
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    g = torch.randn(6, 4, 5, dtype=torch.float64) * torch.rand(6, 4, 1)
    u, _, vh = torch.linalg.svd(rearranged(dense_token_local(tensor_samples(x, g)), 3, 5))
    factors = facts.estimate_factors(FACTS(num_iterations=60, **PLAIN), x, g)
    for factor, vector in ((factors.A, u[:, 0]), (factors.B, vh[0])):
        assert ((factor.flatten() @ vector).abs() / factor.norm()).item() == pytest.approx(1, abs=1e-10)


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
    assert relative_error(left @ right, u[:, :3] * s[:3] @ vh[:3]) < EXACT


def with_spectrum(*eigenvalues):
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


@pytest.mark.parametrize("spectrum", BAD.values(), ids=BAD)
def test_bad_factors_are_marked_and_lose_directions_without_a_repair(spectrum):
    factor = with_spectrum(*spectrum)
    root = square_root(factor, 0.0, repair=None)
    kept = sum(value > 0 for value in spectrum)
    assert root.repaired and torch.linalg.matrix_rank(root.matrix) == torch.linalg.matrix_rank(root.inverse) == kept
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
    assert root.matrix.isfinite().all() and (root.matrix.diagonal() > 0).all()
