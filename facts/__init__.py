"""Shrink pretrained networks by Fisher-weighted SVD."""

import logging
from typing import TYPE_CHECKING

import lazy_loader

from facts.utils.version import __version__ as __version__

if TYPE_CHECKING:  # for type checkers and editors; the same names as below
    from facts.calibration.cutmix import CutMix as CutMix
    from facts.calibration.prepare import Calibration as Calibration
    from facts.calibration.prepare import prepare as prepare
    from facts.compression.compress import compress as compress
    from facts.compression.measure import measure as measure
    from facts.compression.pareto import pareto as pareto
    from facts.compression.quantization import quantize as quantize
    from facts.cost.count import Cost as Cost
    from facts.cost.count import count_cost as count_cost
    from facts.cost.device_times import DeviceTimes as DeviceTimes
    from facts.cost.onnx_times import onnx_times as onnx_times
    from facts.decomposition.truncation import Decomposition as Decomposition
    from facts.decomposition.truncation import decompose as decompose
    from facts.decomposition.truncation import low_rank_factors as low_rank_factors
    from facts.estimators.base import KroneckerFactors as KroneckerFactors
    from facts.estimators.factors import estimate_factors as estimate_factors
    from facts.finetuning.recovery import Recovery as Recovery
    from facts.finetuning.recovery import recover as recover
    from facts.modules.lowrank import LowRankLinear as LowRankLinear
    from facts.modules.pivoted import PivotedLinear as PivotedLinear
    from facts.moments.losses import SampledLabels as SampledLabels
    from facts.moments.losses import next_tokens as next_tokens
    from facts.moments.memory import MemoryPolicy as MemoryPolicy
    from facts.result import CompressionResult as CompressionResult
    from facts.result import Summary as Summary
    from facts.saving.export import export_onnx as export_onnx
    from facts.saving.export import export_program as export_program
    from facts.saving.hub import push_to_hub as push_to_hub
    from facts.saving.load import load_compressed as load_compressed
    from facts.saving.save import save_compressed as save_compressed

# PyTorch's timers warn of a CUDA without a GPU when they are loaded.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

# PyTorch takes seconds to load, and the command line's help need not wait: each name is imported at its first use.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules=["analysis", "estimators", "finetuning", "models", "moments", "pruning", "search", "tasks"],
    submod_attrs={
        "compression.compress": ["compress"],
        "calibration.cutmix": ["CutMix"],
        "compression.measure": ["measure"],
        "compression.pareto": ["pareto"],
        "calibration.prepare": ["Calibration", "prepare"],
        "compression.quantization": ["quantize"],
        "result": ["CompressionResult", "Summary"],
        "cost.count": ["Cost", "count_cost"],
        "cost.device_times": ["DeviceTimes"],
        "cost.onnx_times": ["onnx_times"],
        "decomposition.truncation": ["Decomposition", "decompose", "low_rank_factors"],
        "estimators.base": ["KroneckerFactors"],
        "estimators.factors": ["estimate_factors"],
        "finetuning.recovery": ["Recovery", "recover"],
        "modules.lowrank": ["LowRankLinear"],
        "modules.pivoted": ["PivotedLinear"],
        "moments.losses": ["SampledLabels", "next_tokens"],
        "moments.memory": ["MemoryPolicy"],
        "saving.export": ["export_onnx", "export_program"],
        "saving.hub": ["push_to_hub"],
        "saving.load": ["load_compressed"],
        "saving.save": ["save_compressed"],
    },
)
