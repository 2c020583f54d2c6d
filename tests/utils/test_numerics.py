import pytest
import torch

from facts.utils.numerics import jackknife_errors, mean_and_error


@pytest.fixture
def draws():
    return torch.randn(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).exp()


def test_the_error_of_a_mean_is_that_of_single_samples(draws):
    mean, error = mean_and_error(draws, torch.ones_like(draws))
    assert mean == pytest.approx(draws.mean().item())
    assert error == pytest.approx(draws.std().item() / len(draws) ** 0.5)
    assert mean_and_error(draws[:1], torch.ones(1))[1] is None


def test_a_jackknife_of_a_mean_has_its_closed_form(draws):
    def compute(samples):
        return {"mean": torch.stack(samples).mean().item()}

    (error,) = jackknife_errors(compute, list(draws), num_groups=1000).values()
    assert error == pytest.approx(draws.std().item() / len(draws) ** 0.5)
    assert jackknife_errors(compute, list(draws[:1]), num_groups=10) == {}


def test_the_error_of_a_ratio_is_that_of_a_jackknife(draws):
    """To first order: the jackknife also sees the next one."""
    sizes = 1 + torch.arange(len(draws), dtype=torch.float64) % 7
    sums = sizes * draws

    def compute(pairs):
        return {"ratio": sum(pair[0] for pair in pairs) / sum(pair[1] for pair in pairs)}

    pairs = list(zip(sums.tolist(), sizes.tolist(), strict=True))
    assert mean_and_error(sums, sizes)[1] == pytest.approx(jackknife_errors(compute, pairs, 1000)["ratio"], rel=0.02)
