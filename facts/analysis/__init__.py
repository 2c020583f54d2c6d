"""Analyses of the approximation: the parts of the Fisher that estimators keep and drop, on held-out samples."""

from facts.analysis.base import Analysis, Findings, Subject
from facts.analysis.cross_moments import CrossMoments
from facts.analysis.fisher_similarity import FisherSimilarity
from facts.analysis.similarity import Estimate, cosine, probe_terms
from facts.analysis.throughput import Throughput
from facts.analysis.token_coupling import TokenCoupling, cross_token_coupling, distance_correlations
from facts.analysis.token_store import TokenStore, collect_tokens

__all__ = [
    "Analysis",
    "CrossMoments",
    "Estimate",
    "Findings",
    "FisherSimilarity",
    "Subject",
    "Throughput",
    "TokenCoupling",
    "TokenStore",
    "collect_tokens",
    "cosine",
    "cross_token_coupling",
    "distance_correlations",
    "probe_terms",
]
