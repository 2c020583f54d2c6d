"""Export to OpenVINO's two files, in float32 or in int8, and runs of such files."""

import logging
import os
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from facts.calibration.data import as_batches
from facts.result import CompressionResult
from facts.saving.export import compare, export_onnx, on_cpu, refuse_without_onnx
from facts.utils.extras import needing
from facts.utils.files import staging

NUM_SAMPLES = 300  # NNCF's default
NUM_COMPARED = 32
USELESS = 1.0  # relative squared error: that of zeros

log = logging.getLogger(__name__)


def export_openvino(
    compressed: CompressionResult | nn.Module, example: Tensor, path: Path | str, *, int8: Iterable[Any] | None = None
) -> float:
    """Write the network as `<path>.xml` and `<path>.bin`: in float32, or in int8, calibrated on the first 300 samples.

    `int8` are data as `facts.prepare` takes them, inputs shaped as `example`. NNCF's post-training quantization rounds
    weights and activations, by its scheme for transformers. Returns the relative squared error of the outputs on 32 of
    the samples (0 in float32). In float32 outputs are compared as in `export_onnx`. Raises `ModuleNotFoundError`
    without `facts[openvino]`, and `ValueError` for unfit data, or if the outputs in int8 are no better than zeros.
    """
    path = Path(path)
    openvino = import_openvino(int8=int8 is not None)
    refuse_without_onnx()
    if path.suffix != ".xml":
        raise ValueError(f"OpenVINO writes an .xml and a .bin next to it: name the .xml, not {path.name}")
    model, example = on_cpu(compressed, example)
    samples = [] if int8 is None else samples_of(int8, model, example)
    with TemporaryDirectory() as temporary:
        file = Path(temporary, "model.onnx")
        export_onnx(model, example, file)
        network = openvino.Core().read_model(file)
    with staging(path) as staged:
        openvino.save_model(_quantized(network, samples) if samples else network, staged, compress_to_fp16=False)
        call = openvino_call(staged)
        if not samples:
            compare(model, call, example)
            return 0.0
        error = _relative_error(model, call, samples[:NUM_COMPARED])
        if not error < USELESS:
            raise ValueError(
                f"in int8 the outputs of {type(model).__name__} are no better than zeros (relative squared error "
                f"{error:.3g}); nothing was written: export in float32, or give calibration data like those in use"
            )
    return error


def import_openvino(int8: bool = False) -> Any:
    """OpenVINO without its telemetry, which would write an identifier of this machine and call home."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    os.environ.setdefault("NNCF_CI", "1")  # no telemetry of NNCF's either
    with needing("openvino", "OpenVINO export"):
        if int8:
            import_module("nncf").set_log_level(logging.ERROR)
        return import_module("openvino")


def openvino_call(file: Path | str) -> Callable[[Tensor], Tensor]:
    """Load a file as a function of a batch on the CPU, with torch's number of threads, in no less than float32."""
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    compiled = import_openvino().Core().compile_model(file, "CPU", settings)
    return lambda batch: torch.from_numpy(next(iter(compiled(batch.numpy()).values())).copy())


def samples_of(data: Iterable[Any], model: nn.Module, example: Tensor) -> list[Tensor]:
    """The first samples `[1, ...]`. Raises `ValueError` if there are none, or none of the example's shape."""
    inputs = (batch for batch, _ in as_batches(data, model) or ())
    samples = list(islice(chain.from_iterable(batch.cpu().split(1) for batch in inputs), NUM_SAMPLES))
    if not samples:
        raise ValueError("the data to calibrate int8 on are empty: give some images")
    if samples[0].shape[1:] != example.shape[1:]:
        shapes = f"{list(samples[0].shape[1:])}, and the example is {list(example.shape[1:])}"
        raise ValueError(f"a sample to calibrate int8 on is {shapes}: they must be alike")
    return samples


def _quantized(network: Any, samples: list[Tensor]) -> Any:
    nncf = import_module("nncf")
    return nncf.quantize(
        network,
        nncf.Dataset(samples, lambda sample: sample.numpy()),
        preset=nncf.QuantizationPreset.MIXED,
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(samples),
    )


@torch.no_grad()
def _relative_error(model: nn.Module, call: Callable[[Tensor], Tensor], samples: list[Tensor]) -> float:
    """‖changed - original‖² / ‖original‖² over all samples, in float64."""
    batch = torch.cat(samples)
    original, changed = model(batch).double(), call(batch).double()
    return ((changed - original).square().sum() / original.square().sum()).item()
