"""Shrink pretrained networks by Fisher-weighted SVD."""

from facts import search
from facts.compression import compress
from facts.cost import Cost, count_cost
from facts.decomposition import Decomposition, decompose, low_rank_factors
from facts.estimators import KroneckerFactors
from facts.export import export_onnx, export_program
from facts.factors import estimate_factors
from facts.losses import next_tokens
from facts.lowrank import LowRankLinear
from facts.memory import MemoryPolicy
from facts.result import CompressionResult, Summary
from facts.storage import load_compressed, save_compressed
from facts.version import __version__

__all__ = [
    "CompressionResult",
    "Cost",
    "Decomposition",
    "KroneckerFactors",
    "LowRankLinear",
    "MemoryPolicy",
    "Summary",
    "__version__",
    "compress",
    "count_cost",
    "decompose",
    "estimate_factors",
    "export_onnx",
    "export_program",
    "load_compressed",
    "low_rank_factors",
    "next_tokens",
    "save_compressed",
    "search",
]
