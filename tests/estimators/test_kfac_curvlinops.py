"""KFAC against an independent library."""

import pytest
from curvlinops import KFACLinearOperator
from torch import nn

from facts.estimators import KFACExpand, KFACReduce
from facts.moments import collect_moments
from facts.parts.layers import select_layers
from tests.networks import image_batches, make_convnext, make_vit, relative_error


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(
    ("approximation", "estimator"), [("expand", KFACExpand(grad_clip=None)), ("reduce", KFACReduce(grad_clip=None))]
)
@pytest.mark.parametrize(("make", "shape"), [(make_vit, (3, 16, 16)), (make_convnext, (3, 32, 32))])
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
