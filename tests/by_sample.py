"""The estimators without what they define by batch: sums over samples, whatever batch a sample is in."""

from facts.estimators import ESTIMATORS, FACTS, KFACExpand, KFACReduce, Shampoo2

WHOLE = {"grad_clip": None, "normalize": "none"}

BY_SAMPLE = {name: estimator() for name, estimator in ESTIMATORS.items() if name != "asvd"} | {
    "facts": FACTS(**WHOLE),
    "shampoo2": Shampoo2(**WHOLE),
    "kfac_expand": KFACExpand(grad_clip=None),
    "kfac_reduce": KFACReduce(grad_clip=None),
}
