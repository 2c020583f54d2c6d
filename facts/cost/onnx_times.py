"""Latency of ONNX files in ONNX Runtime, on this machine's CPU."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from facts.cost.timing import DEFAULT_TIMING, Timing, TimingPolicy
from facts.utils.extras import needing


def onnx_call(file: Path | str) -> Callable[[Tensor], Tensor]:
    """Load a file of `facts.export_onnx` as a function of a batch, with torch's number of threads."""
    with needing("export", "running ONNX files"):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda batch: torch.from_numpy(session.run(None, {"input": batch.numpy()})[0])


def onnx_times(
    files: Mapping[str, Path | str], batch: Tensor, timing: TimingPolicy = DEFAULT_TIMING
) -> dict[str, Timing]:
    """Time files of `facts.export_onnx`, by name, in turns on one batch, with torch's number of threads.

    Raises `ModuleNotFoundError` without `facts[export]`.
    """
    return timing.times({name: partial(onnx_call(file), batch) for name, file in files.items()})
