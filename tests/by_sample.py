"""The estimators without what they define by batch: sums over samples, whatever batch a sample is in."""

from facts.estimators import ESTIMATORS, FACTS, KFACExpand, KFACReduce, Shampoo2
from facts.moments import collect_moments
from facts.parts.layers import select_layers
from tests.networks import relative_error

WHOLE = {"grad_clip": None, "normalize": "none"}
EVERY = {name: estimator() for name, estimator in ESTIMATORS.items()}
BY_SAMPLE = {name: estimator for name, estimator in EVERY.items() if name != "asvd"} | {
    "facts": FACTS(**WHOLE),
    "shampoo2": Shampoo2(**WHOLE),
    "kfac_expand": KFACExpand(grad_clip=None),
    "kfac_reduce": KFACReduce(grad_clip=None),
}


def factors_of(model, batches, estimators, **options):
    """The factors by estimator and layer, from one pass over the union of the estimators' moments."""
    wanted = [moment for estimator in estimators.values() for moment in estimator.moments]
    moments = collect_moments(model, select_layers(model).layers, batches, wanted, **options)
    return {(name, layer): each.factors(moments[layer]) for name, each in estimators.items() for layer in moments}


def assert_same_factors(found, expected):
    """The factors by estimator and layer, to float64 sums in another order.

    Lanczos and power iteration end with a residual or step of 1e-9 or 1e-8; the gap to the second pair decides how far
    the limit is.
    """
    assert found.keys() == expected.keys()
    for place, factors in found.items():
        for side in "AB":
            ours, theirs = getattr(factors, side), getattr(expected[place], side)
            assert (ours is None) == (theirs is None), (place, side)
            bound = 1e-7 if "gfwsvd" in place[0] else 1e-12
            assert ours is None or relative_error(ours, theirs) < bound, (place, side)
