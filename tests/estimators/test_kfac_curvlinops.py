"""KFAC against an independent library."""

import pytest
import torch
from curvlinops import KFACLinearOperator
from torch import nn

from facts.calibration.selection import select_layers
from facts.estimators import KFACExpand, KFACReduce
from facts.moments import collect_moments
from tests.networks import image_batches, make_convnext, relative_error


class TokenNet(nn.Module):
    """`[N, 3, 8, 8]` as 16 tokens that meet in between."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 10)
        self.second = nn.Linear(10, 13, bias=False)
        self.head = nn.Linear(13, 4)

    def forward(self, images):
        x = images.reshape(len(images), 16, 12)
        x = torch.tanh(self.first(x))
        x = torch.softmax(x @ x.mT, dim=-1) @ x
        return self.head(torch.tanh(self.second(x)).mean(dim=1))


def make_token_net():
    torch.manual_seed(0)
    return TokenNet().double()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(
    ("approximation", "estimator"), [("expand", KFACExpand(grad_clip=None)), ("reduce", KFACReduce(grad_clip=None))]
)
@pytest.mark.parametrize(("make", "shape"), [(make_token_net, (3, 8, 8)), (make_convnext, (3, 32, 32))])
def test_factors_are_curvlinops_up_to_a_constant(make, shape, approximation, estimator, reduction):
    model = make().eval()
    batches = image_batches([3, 3, 1], shape=shape)
    layers = select_layers(model).layers
    operator = KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(reduction=reduction),
        [layer.weight for layer in layers.values()],
        batches,
        fisher_type="empirical",
        kfac_approx=approximation,
        check_deterministic=False,
    )
    operator.compute_kronecker_factors()
    theirs = operator.state_dict()
    moments = collect_moments(model, layers, batches, estimator.moments)
    for name in layers:
        factors = estimator.factors(moments[name])
        A, B = theirs["input_covariances"][name], theirs["gradient_covariances"][name]
        assert relative_error(factors.A, A) < 1e-12  # float64 sums in another order
        assert relative_error(factors.B / factors.B.trace(), B / B.trace()) < 1e-12
