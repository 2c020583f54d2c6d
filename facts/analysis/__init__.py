"""Analyses of the approximation: the parts of the Fisher that estimators keep and drop, on held-out samples."""

from facts.analysis.base import Analysis, Findings, Subject
from facts.analysis.cross_moments import CrossMoments
from facts.analysis.device import DeviceRecord
from facts.analysis.fisher_similarity import FisherSimilarity
from facts.analysis.throughput import Throughput
from facts.analysis.token_coupling import TokenCoupling

__all__ = [
    "Analysis",
    "CrossMoments",
    "DeviceRecord",
    "Findings",
    "FisherSimilarity",
    "Subject",
    "Throughput",
    "TokenCoupling",
]
