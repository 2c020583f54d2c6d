"""Export to OpenVINO's two files, in float32 or int8, and run such files."""

import os
import subprocess
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from facts.result import CompressionResult
from facts.saving.export import Call, checked, export_onnx, on_cpu, refuse_without_onnx, samples_of
from facts.utils.extras import needing
from facts.utils.files import staging


def export_openvino(
    compressed: CompressionResult | nn.Module, example: Tensor, path: Path | str, *, int8: Iterable[Any] | None = None
) -> float:
    """Write the network to `path`, an `.xml`, and a `.bin` next to it, in float32 or calibrated int8.

    `int8` is data as for `facts.prepare`, with inputs shaped as `example`, of which the first 300 are used. NNCF's
    post-training quantization rounds weights and activations, with its scheme for transformers. Returns the relative
    squared error of the outputs on 32 samples (0 in float32, where outputs are compared as in `export_onnx`). Raises
    `ModuleNotFoundError` without `facts[openvino]`, `ValueError` for unsuitable data or int8 outputs as bad as zeros.
    """
    path = Path(path)
    openvino = import_openvino(int8=int8 is not None)
    refuse_without_onnx()
    if path.suffix != ".xml":
        raise ValueError(f"OpenVINO writes an .xml and a .bin next to it: name the .xml, not {path.name}")
    model, example = on_cpu(compressed, example)
    samples = [] if int8 is None else samples_of(int8, model, example)
    with TemporaryDirectory() as temporary:
        file, inputs = Path(temporary, "model.onnx"), Path(temporary, "inputs.npy")
        export_onnx(model, example, file)
        with staging(path) as staged:
            if samples:
                np.save(inputs, torch.cat(samples).numpy())
                # In a new process: NNCF changes logging globally, and processes that fork after its import may crash.
                command = [sys.executable, "-m", __name__, *map(str, (file, inputs, staged))]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    reasons = done.stderr.strip().splitlines() or ["its process was killed, often for lack of memory"]
                    raise RuntimeError(f"NNCF could not quantize the network: {reasons[-1]}")
            else:
                openvino.save_model(openvino.Core().read_model(file), staged, compress_to_fp16=False)
            return checked(model, openvino_call(staged), example, samples)


def import_openvino(int8: bool = False) -> Any:
    """Import OpenVINO without its telemetry, which would store an identifier of this machine and call home."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    with needing("openvino", "OpenVINO export"):
        if int8 and find_spec("nncf") is None:
            raise ModuleNotFoundError(name="nncf")
        return import_module("openvino")


def openvino_call(file: Path | str, precision: torch.dtype = torch.float32) -> Call:
    """Load a file as a function of a batch on the CPU, with torch's number of threads.

    Everything except the integers in the file is computed in `precision`; `openvino_formats` lists this CPU's choices.
    """
    hint = "bf16" if precision == torch.bfloat16 else "f32"
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": hint}
    compiled = import_openvino().Core().compile_model(file, "CPU", settings)
    return lambda batch: torch.from_numpy(next(iter(compiled(batch.numpy()).values())).copy())


def openvino_formats() -> list[str]:
    """List the floating-point formats that OpenVINO computes in on this CPU."""
    able = import_openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return ["float32", "bfloat16"] if "BF16" in able else ["float32"]


def quantize(file: str, inputs: str, out: str) -> None:
    """Quantize the network in an ONNX file, calibrated on inputs `[N, ...]` in an array, and write OpenVINO's files."""
    os.environ.setdefault("NNCF_CI", "1")  # no telemetry from NNCF either
    openvino, nncf = import_openvino(), import_module("nncf")
    samples = np.load(inputs)
    network = nncf.quantize(
        openvino.Core().read_model(file),
        nncf.Dataset(range(len(samples)), lambda index: samples[index : index + 1]),
        preset=nncf.QuantizationPreset.MIXED,
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(samples),
    )
    openvino.save_model(network, out, compress_to_fp16=False)


if __name__ == "__main__":
    quantize(*sys.argv[1:])
