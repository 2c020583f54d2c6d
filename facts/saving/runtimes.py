"""Speed of networks in the runtimes and number formats that their device supports."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from facts.cost.timing import DEFAULT_TIMING, TimingPolicy
from facts.modules.linear_calls import copy_with
from facts.modules.networks import reads_tokens, run
from facts.saving.export import export_onnx, onnx_call
from facts.saving.openvino_ir import export_openvino, openvino_call, openvino_formats

Call = Callable[[Tensor], Any]
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COMPILERS: dict[str, dict[str, Any] | None] = {  # arguments of torch.compile
    "PyTorch": None,
    "PyTorch compiled": {},
    "CUDA graph": {"mode": "reduce-overhead"},
    "PyTorch fused": {"options": {"b2b_gemm_pass": True}},  # a low-rank layer's two products in one Triton kernel
}


@dataclass(frozen=True)
class RuntimeSpeed:
    """Samples per second in batches, their relative interquartile range (`spread`), and seconds for a single sample."""

    network: str
    runtime: str
    throughput: float
    spread: float
    latency: float


def runtimes_of(device: torch.device, *, int8: bool = False) -> list[str]:
    """List the runtimes installed, with their number formats; int8, which needs calibration data, only on request."""
    if device.type != "cpu":
        return [f"{kind}, {name}" for kind in COMPILERS for name in FORMATS]
    found = [f"{kind}, {name}" for kind in list(COMPILERS)[:2] for name in list(FORMATS)[:2]]
    if all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))):
        found += ["ONNX Runtime, float32", *(["ONNX Runtime, int8"] if int8 else [])]
        if find_spec("openvino"):
            found += [f"OpenVINO, {name}" for name in openvino_formats()]
            found += ["OpenVINO, int8"] if int8 and find_spec("nncf") else []
    return found


def benchmark(
    networks: Mapping[str, nn.Module],
    batch: Tensor,
    *,
    runtimes: Iterable[str] | None = None,
    int8: Iterable[Any] | None = None,
    timing: TimingPolicy = DEFAULT_TIMING,
) -> list[RuntimeSpeed]:
    """Time networks on a batch `[N, ...]` and on its first sample; all networks and runtimes take turns.

    `runtimes` are names from `runtimes_of` (default: all; for language models only PyTorch's). int8 is calibrated on
    the data `int8`. Raises `ValueError` for other names, or for a network that cannot be exported.
    """
    known = runtimes_of(batch.device, int8=int8 is not None)
    if any(map(reads_tokens, networks.values())):
        known = [name for name in known if name.partition(", ")[0] in COMPILERS]
    chosen = known if runtimes is None else list(runtimes)
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"there is no runtime {unknown[0]!r} here: choose from {'; '.join(known)}")
    with TemporaryDirectory() as temporary:
        folders = {name: Path(temporary, str(number)) for number, name in enumerate(networks)}
        calls = {
            f"{runtime}: {name}": _load(networks[name], runtime, batch, folder, int8)
            for runtime, (name, folder) in product(chosen, folders.items())
        }
        whole, single = (
            timing.times({key: partial(call, inputs) for key, call in calls.items()}) for inputs in (batch, batch[:1])
        )
    return [
        RuntimeSpeed(name, runtime, len(batch) / whole[key].median, whole[key].spread, single[key].median)
        for (runtime, name), key in zip(product(chosen, networks), calls, strict=True)
    ]


def _load(network: nn.Module, runtime: str, batch: Tensor, folder: Path, int8: Iterable[Any] | None) -> Call:
    """Load the network in a runtime and format, as a function of a batch; its files are kept in the folder."""
    kind, _, number_format = runtime.partition(", ")
    if kind in COMPILERS:
        return _in_pytorch(network, FORMATS[number_format], COMPILERS[kind])
    folder.mkdir(exist_ok=True)
    if number_format != "int8":
        file = folder / "float32.onnx"
        if not file.exists():
            export_onnx(network, batch[:1], file)
    elif kind == "ONNX Runtime":
        export_onnx(network, batch[:1], file := folder / "int8.onnx", int8=int8)
    else:
        export_openvino(network, batch[:1], file := folder / "int8.xml", int8=int8)
    if kind == "ONNX Runtime":
        return onnx_call(file)
    return openvino_call(file, torch.bfloat16 if number_format == "bfloat16" else torch.float32)


def _in_pytorch(network: nn.Module, dtype: torch.dtype, compiler: dict[str, Any] | None) -> Call:
    """Make a function of a batch, with weights and images in `dtype`; compiled unless `compiler` is None."""
    model: Any = copy_with(network).to(dtype).eval()
    model = model if compiler is None else torch.compile(model, dynamic=False, **compiler)

    @torch.inference_mode()
    def call(batch: Tensor) -> Any:
        return run(model, batch.to(dtype) if batch.is_floating_point() else batch)

    return call
