import numpy as np
import pytest
import torch

from facts.utils.numerics import jackknife_errors, mean_and_error


@pytest.fixture
def draws():
    return torch.randn(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).exp()


def test_both_errors_of_a_mean_have_its_closed_form(draws):
    def compute(samples):
        return {"mean": torch.stack(samples).mean().item()}

    closed_form = draws.std().item() / len(draws) ** 0.5
    assert mean_and_error(draws, torch.ones_like(draws)) == pytest.approx((draws.mean().item(), closed_form))
    assert jackknife_errors(compute, list(draws), num_groups=1000) == pytest.approx({"mean": closed_form})
    assert mean_and_error(draws[:1], torch.ones(1))[1] is None and not jackknife_errors(compute, list(draws[:1]), 10)


def test_the_error_of_a_ratio_is_that_of_a_jackknife(draws):
    """To first order: the jackknife also sees the next one."""
    sizes = 1 + torch.arange(len(draws), dtype=torch.float64) % 7
    pairs = torch.stack([sizes * draws, sizes], dim=1)
    found = jackknife_errors(lambda kept: {"ratio": np.divide(*np.sum(kept, axis=0))}, pairs.numpy(), 1000)
    assert mean_and_error(*pairs.T)[1] == pytest.approx(found["ratio"], rel=0.02)
