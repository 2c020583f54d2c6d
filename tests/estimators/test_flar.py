import pytest
import torch
from sklearn.covariance import ledoit_wolf_shrinkage

from facts.compression.selection import select_layers
from facts.estimators import FLAR, SVDLLM
from facts.moments import LiteralShrunkGram, collect_moments
from facts.moments.batch import LayerBatch
from facts.moments.losses import summed_cross_entropy
from tests.networks import relative_error
from tests.oracles.samples import model_samples


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
    total = moment.init_state("layer", batch.x, x.shape[-1], 1, None)
    moment.add(total, batch)
    return moment.finalize(total)[0]


def test_literal_amount_is_rounding_error():
    """1e10 times the rounding error of a trace (1e-15) leaves less than 1e-4 of shrinkage at the scale of 1."""
    x = torch.randn(4, 6, 5, dtype=torch.float64)
    plain = torch.einsum("nti,ntj->ij", x, x) / 4
    assert relative_error(literal(x), plain) < 1e-4


def test_literal_amount_depends_on_the_scale():
    """The published rule is not invariant: for small inputs the same rounding error is 0 or 1, never in between.

    Of a trace's rounding errors one in ten or more is above 0, whatever the order of a machine's sums.
    """
    amounts = set()
    for _ in range(200):
        x = 1e-9 * torch.randn(4, 6, 5, dtype=torch.float64)
        plain, shrunk = torch.einsum("nti,ntj->ij", x, x) / 4, literal(x)
        amounts.add(round(1 - float(shrunk[0, 1] / plain[0, 1]), 6))
        assert float(shrunk.trace()) == pytest.approx(float(plain.trace()), rel=1e-12)
    assert amounts == {0.0, 1.0}


def test_literal_sums_over_batches(model, batches):
    layers, estimator = select_layers(model).layers, FLAR(covariance_shrinkage="literal")
    moments = collect_moments(model, layers, batches, estimator.moments)
    samples = model_samples(model, batches, summed_cross_entropy)
    for name in layers:
        expected = sum(sum(s.X.T @ s.X for s in batch) / len(batch) for batch in samples[name])
        A = estimator.factors(moments[name]).A
        assert relative_error(A * moments[name].num_tokens, expected) < 1e-4  # the amount above
        assert estimator.shrinkage(moments[name]) == (0.0, 0.0)


def test_without_shrinkage_it_is_svd_llm_up_to_a_constant(model, batches):
    layers = select_layers(model).layers
    moments = collect_moments(model, layers, batches, [*FLAR().moments, *SVDLLM().moments])
    for values in moments.values():
        flar, svd_llm = FLAR().factors(values), SVDLLM().factors(values)
        assert relative_error(flar.A * values.num_tokens, svd_llm.A) < 1e-14
        assert flar.B is svd_llm.B is None
