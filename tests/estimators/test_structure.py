"""The two structural properties that estimators claim (paper, table of estimators) are theirs."""

import pytest
import torch

import facts
from facts.estimators import ESTIMATORS, GFWSVD
from tests.by_sample import BY_SAMPLE
from tests.networks import relative_error

CLAIMING = [name for name, estimator in ESTIMATORS.items() if estimator.token_local is not None]


def factors(name, x, g):
    estimator = GFWSVD(group_size=1) if name == "gfwsvd" else BY_SAMPLE[name]
    found = facts.estimate_factors(estimator, x, g)
    return [factor / factor.norm() for factor in (found.A, found.B)]


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, 3, generator=generator, dtype=torch.float64)
    return x, x @ torch.randn(3, 5, generator=generator, dtype=torch.float64) * x[..., :1]


@pytest.mark.parametrize("name", CLAIMING)
def test_a_token_local_estimator_does_not_see_which_tokens_belong_together(tensors, name):
    x, g = tensors
    together = factors(name, x, g)
    apart = factors(name, x.reshape(24, 1, 3), g.reshape(24, 1, 5))
    same = all(relative_error(a, b) < 1e-12 for a, b in zip(together, apart, strict=True))
    assert same == ESTIMATORS[name].token_local


@pytest.mark.parametrize("name", CLAIMING)
def test_a_coupling_estimator_sees_which_gradient_belongs_to_which_activation(tensors, name):
    x, g = tensors
    own, other = factors(name, x, g), factors(name, x, g[torch.tensor([3, 0, 5, 1, 2, 4])])
    same = all(relative_error(a, b) < 1e-12 for a, b in zip(own, other, strict=True))
    assert same != ESTIMATORS[name].couples
