"""Export of a network to one file that runs without this package: ONNX, or the `.pt2` of `torch.export`."""

import copy
import io
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from facts.modules.networks import OneTensor, is_transformers
from facts.result import CompressionResult
from facts.saving.comparison import checked, compare
from facts.saving.int8 import quantize_onnx, samples_of
from facts.utils.extras import needing
from facts.utils.files import staging

OPSET = 20  # torch's own default; read by ONNX Runtime since 1.17 and by TensorRT since 10.0


def export_onnx(
    compressed: CompressionResult | nn.Module, example: Tensor, path: Path | str, *, int8: Iterable[Any] | None = None
) -> float:
    """Write the network as ONNX, opset 20: `input [N, ...]` to `output`, for any N, otherwise shaped as `example`.

    `output` of a network of transformers is its logits, or else the features of the whole image (`image_embeds` or
    `pooler_output`).
    In float32, ONNX Runtime must match PyTorch's outputs to 1e-4 of the largest, on the batch `example` and with one
    more sample; otherwise nothing is written and `ValueError` is raised. `int8` is data as for `facts.prepare`; its
    first 300 samples calibrate ONNX Runtime's static quantization. Returns the relative squared error of the outputs on
    32 of them (0 in float32). Weights above 1.5 GB are stored as `<path>.data`. Raises `ModuleNotFoundError` without
    `facts[export]`, and `ValueError` for a network that is not in float32, for unsuitable data, or if the outputs in
    int8 are no better than zeros.
    """
    refuse_without_onnx()
    model, example = on_cpu(compressed, example)
    if other := {str(parameter.dtype) for parameter in model.parameters()} - {"torch.float32"}:
        raise ValueError(
            f"ONNX is written in float32, but the network is in {', '.join(other)}: export `model.float()`"
        )
    samples = [] if int8 is None else samples_of(int8, model, example)
    options: dict[str, Any] = {"dynamo": True, "verbose": False, "opset_version": OPSET}
    if isinstance(model, OneTensor):
        model.network.set_attn_implementation("eager")  # others cannot be converted for Swin
    with staging(Path(path)) as staged, TemporaryDirectory() as temporary:
        program = torch.onnx.export(_trace(model, example), input_names=["input"], output_names=["output"], **options)
        assert program is not None  # with dynamo
        program.save(written := Path(temporary, "model.onnx") if samples else staged)
        if samples:
            quantize_onnx(written, samples, staged)
        return checked(model, onnx_call(staged), example, samples)


def refuse_without_onnx() -> None:
    """Raises `ModuleNotFoundError` without the packages of `facts[export]`."""
    with needing("export", "ONNX export"):
        for package in ("onnx", "onnxscript", "onnxruntime"):
            import_module(package)


def onnx_call(file: Path | str) -> Callable[[Tensor], Tensor]:
    """Load an ONNX file in ONNX Runtime as a function of a batch on the CPU, with torch's number of threads."""
    with needing("export", "running ONNX files"):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda batch: torch.from_numpy(session.run(None, {"input": batch.numpy()})[0])


def export_program(compressed: CompressionResult | nn.Module, example: Tensor, path: Path | str) -> None:
    """Write the network as a `.pt2` that `torch.export.load(path).module()` runs on the CPU, for any batch size.

    `example` and the comparison of outputs are as in `export_onnx`. Raises `ValueError` if outputs differ.
    """
    model, example = on_cpu(compressed, example)
    with staging(Path(path)) as staged:
        buffer = io.BytesIO()  # torch's own writer ends the process if the disk is full
        torch.export.save(_trace(model, example), buffer)
        staged.write_bytes(buffer.getbuffer())
        compare(model, torch.export.load(staged).module(), example)


def on_cpu(compressed: CompressionResult | nn.Module, example: Tensor) -> tuple[nn.Module, Tensor]:
    """Copy the network, in evaluation mode, and the batch to the CPU, so that the file depends on no device."""
    if not isinstance(example, Tensor) or example.ndim == 0 or len(example) == 0:
        got = f"{type(example).__name__} of shape {list(getattr(example, 'shape', []))}"
        raise ValueError(f"the example must be a batch of at least one input, as one tensor [N, ...], got a {got}")
    model = compressed.model if isinstance(compressed, CompressionResult) else compressed
    model = copy.deepcopy(model).cpu().eval()
    return OneTensor(model) if is_transformers(model) else model, example.detach().cpu()


def _trace(model: nn.Module, example: Tensor) -> ExportedProgram:
    """Trace the graph for any batch size, without the example's data and this machine's source files."""
    batch = torch.cat([example, example])  # torch would treat one sample as a constant batch size
    program = torch.export.export(model, (batch,), dynamic_shapes=({0: Dim("batch")},))
    program.example_inputs = None
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program
