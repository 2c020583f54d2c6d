"""Analyses of the approximation: the parts of the Fisher that estimators keep and drop, on held-out samples."""

from facts.analysis.base import Analysis as Analysis
from facts.analysis.base import AnalysisInputs as AnalysisInputs
from facts.analysis.base import Findings as Findings
from facts.analysis.fisher import CrossMoments as CrossMoments
from facts.analysis.fisher import FisherSimilarity as FisherSimilarity
from facts.analysis.throughput import DeviceRecord as DeviceRecord
from facts.analysis.throughput import Throughput as Throughput
from facts.analysis.token_coupling import TokenCoupling as TokenCoupling
