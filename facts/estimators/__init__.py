"""Estimators: from moments to Kronecker factors, one file per method."""

from facts.estimators.base import Estimator, KroneckerFactors
from facts.utils.options import load_methods

ESTIMATORS = load_methods("facts.estimators.methods", Estimator)  # type: ignore[type-abstract]
globals().update((method.__name__, method) for method in ESTIMATORS.values())  # facts.estimators.FACTS, and so on

__all__ = ["ESTIMATORS", "Estimator", "KroneckerFactors", *(method.__name__ for method in ESTIMATORS.values())]
