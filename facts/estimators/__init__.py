"""The ten methods: from moments to Kronecker factors, one file each."""

from facts.estimators.asvd import ASVD
from facts.estimators.base import Estimator, KroneckerFactors
from facts.estimators.facts import FACTS
from facts.estimators.flar import FLAR
from facts.estimators.fwsvd import FWSVD
from facts.estimators.gfwsvd import GFWSVD
from facts.estimators.kfac_expand import KFACExpand
from facts.estimators.kfac_reduce import KFACReduce
from facts.estimators.pela import PELA
from facts.estimators.shampoo2 import Shampoo2
from facts.estimators.svd_llm import SVDLLM

ESTIMATORS: dict[str, type[Estimator]] = {
    "facts": FACTS,
    "kfac_expand": KFACExpand,
    "kfac_reduce": KFACReduce,
    "shampoo2": Shampoo2,
    "gfwsvd": GFWSVD,
    "svd_llm": SVDLLM,
    "flar": FLAR,
    "asvd": ASVD,
    "fwsvd": FWSVD,
    "pela": PELA,
}

__all__ = ["ESTIMATORS", "Estimator", "KroneckerFactors", *(cls.__name__ for cls in ESTIMATORS.values())]
