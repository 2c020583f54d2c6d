"""Analyses of the approximation: the parts of the Fisher that estimators keep and drop, on held-out samples."""

from facts.analysis.base import Analysis, Findings, Subject
from facts.analysis.fisher import CrossMoments, FisherSimilarity
from facts.analysis.throughput import DeviceRecord, Throughput
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
