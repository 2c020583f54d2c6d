"""Distance of a compressed network's outputs from the original's, and the warning about a budget that is too small."""

import logging

import pytest
import torch
from torch import nn

import facts
from facts.calibration.distance import distance
from facts.moments.losses import kl_divergence, squared_error
from tests.networks import image_batches, make_model

BATCHES = image_batches([8] * 10)


class Given(nn.Module):
    """Given outputs, by the index of each sample."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = nn.Parameter(outputs)

    def forward(self, indices):
        return self.outputs[indices]


def compare(original, changed, error, sizes=(5, 1, 6)):
    indices = [(part, None) for part in torch.arange(sum(sizes)).split(list(sizes))]
    return distance(Given(original), Given(changed), indices, error, torch.float32)


@pytest.mark.parametrize("shape", [(12, 5), (12, 3, 5)])
def test_information_in_class_logits(shape, monkeypatch):
    """Compared with loops over samples; in chunks as for language models too."""
    monkeypatch.setattr("facts.calibration.distance.KL_VALUES", 10)
    torch.manual_seed(0)
    original, changed = (3 * torch.randn(shape, dtype=torch.float64) for _ in range(2))
    rows, others = (logits.reshape(-1, 5).softmax(dim=1) for logits in (original, changed))
    mean = rows.mean(dim=0)
    error = sum(row @ (row / other).log() for row, other in zip(rows, others, strict=True))
    information = sum(row @ (row / mean).log() for row in rows)
    found = compare(original, changed, kl_divergence)
    assert (found.mean, found.share) == pytest.approx((error.item() / 12, (error / information).item()))
    assert found.num_samples == 12


def test_outputs_that_do_not_depend_on_the_input_lose_everything():
    torch.manual_seed(0)
    original = 3 * torch.randn(12, 5, dtype=torch.float64)
    constant = original.softmax(dim=1).mean(dim=0).log().expand(12, 5)
    assert compare(original, constant, kl_divergence).share == pytest.approx(1)
    assert compare(original, original, kl_divergence).share == pytest.approx(0)
    assert compare(original, 0 * original, squared_error).share == 1
    assert compare(original, original, lambda first, second: (first - second).sum()).share is None


def test_outputs_that_become_nan_are_an_error_whatever_compares_them():
    original = torch.randn(12, 5)
    changed = original.clone()
    original[2, 0] = changed[2, 0] = -torch.inf  # as the original's are
    assert compare(original, changed, lambda first, second: (first - second)[:, 1].sum()).mean == 0
    changed[3, 0] = torch.nan
    with pytest.raises(ValueError, match="gives NaN or infinity where the original's outputs are finite: try form="):
        compare(original, changed, lambda first, second: (first - second)[:, 1].sum())


def test_a_budget_that_is_too_small(caplog):
    with caplog.at_level(logging.WARNING):
        result = facts.compress(make_model(), BATCHES, estimator="pela", search="uniform", form="plain", ratio=0.3)
    assert result.summary.distance.is_too_far
    options = (
        'try form="pivoted", parts="units", '
        'search="cors_fisher", '
        "facts.recover(result, data, minutes=10), or a larger budget"
    )
    assert f"information is lost; {options}" in caplog.text and f"the outputs are far off: {options}" in str(result)
    assert facts.compress(make_model(), estimator="pela").summary.distance is None  # nothing to compare on
