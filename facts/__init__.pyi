from . import (
    analysis,
    compression,
    estimators,
    layers,
    losses,
    models,
    moments,
    parallel,
    pruning,
    search,
    tasks,
)
from .comparison import pareto
from .compression import compress
from .cost import Cost, count_cost
from .decomposition import Decomposition, decompose, low_rank_factors
from .estimators import KroneckerFactors
from .export import export_onnx, export_program
from .factors import estimate_factors
from .losses import SampledLabels, next_tokens
from .lowrank import LowRankLinear
from .memory import MemoryPolicy
from .result import CompressionResult, Summary
from .sharing import push_to_hub
from .storage import load_compressed, save_compressed
from .version import __version__

__all__ = [
    "CompressionResult",
    "Cost",
    "Decomposition",
    "KroneckerFactors",
    "LowRankLinear",
    "MemoryPolicy",
    "SampledLabels",
    "Summary",
    "__version__",
    "analysis",
    "compress",
    "compression",
    "count_cost",
    "decompose",
    "estimate_factors",
    "estimators",
    "export_onnx",
    "export_program",
    "layers",
    "load_compressed",
    "losses",
    "low_rank_factors",
    "models",
    "moments",
    "next_tokens",
    "parallel",
    "pareto",
    "pruning",
    "push_to_hub",
    "save_compressed",
    "search",
    "tasks",
]
