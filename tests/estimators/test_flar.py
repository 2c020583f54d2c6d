import numpy as np
import pytest
import torch
from sklearn.covariance import ledoit_wolf_shrinkage

from facts.estimators import FLAR
from facts.moments import LiteralShrunkGram, collect_moments
from facts.moments.batch import LayerBatch
from facts.moments.losses import summed_cross_entropy
from facts.parts.layers import select_layers
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
