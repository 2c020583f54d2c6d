"""Export of a network to one file that runs without this package: ONNX, or the `.pt2` of `torch.export`."""

import copy
import io
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from facts.calibration.data import as_batches
from facts.modules.networks import OneTensor, is_transformers
from facts.result import CompressionResult
from facts.utils.extras import needing
from facts.utils.files import staging
from facts.utils.silence import silence

Call = Callable[[Tensor], Tensor]

OPSET = 20  # torch's own default; read by ONNX Runtime since 1.17 and by TensorRT since 10.0
TOLERANCE = 1e-4  # relative to the largest output
NUM_SAMPLES = 300  # that calibrate int8, NNCF's default
NUM_COMPARED = 32
USELESS = 1.0  # relative squared error of outputs that are all zero
LAYERS = ["Conv", "Gemm", "MatMul"]


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
            _quantize(written, samples, staged)
        return checked(model, onnx_call(staged), example, samples)


def refuse_without_onnx() -> None:
    """Raises `ModuleNotFoundError` without the packages of `facts[export]`."""
    with needing("export", "ONNX export"):
        for package in ("onnx", "onnxscript", "onnxruntime"):
            import_module(package)


def onnx_call(file: Path | str) -> Call:
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
        _compare(model, torch.export.load(staged).module(), example)


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


def _quantize(file: Path, samples: Iterable[Tensor], out: Path) -> None:
    """Round the weights of linear layers and convolutions, one scale per channel, and their inputs, one per tensor.

    Everything else stays in float32, such as attention's products. So do outputs: if they are rounded too, some
    releases of ONNX Runtime fuse layers incorrectly. Uses its static quantization in the default format.
    """
    from onnxruntime.quantization import quantize_static

    inputs = iter([{"input": sample.numpy()} for sample in samples])
    reader: Any = SimpleNamespace(get_next=lambda: next(inputs, None))
    with silence():  # it recommends steps that change nothing in such a file
        quantize_static(
            file,
            out,
            reader,
            op_types_to_quantize=LAYERS,
            per_channel=True,
            reduce_range=True,  # to seven bits: without VNNI, CPUs add two products in 16 bits; eight bits overflow
            use_external_data_format=file.with_name(f"{file.name}.data").exists(),
            extra_options={"MatMulConstBOnly": True, "OpTypesToExcludeOutputQuantization": LAYERS},
        )


def samples_of(data: Iterable[Any], model: nn.Module, example: Tensor) -> list[Tensor]:
    """The first 300 samples `[1, ...]`. Raises `ValueError` if there are none, or shapes differ from the example's."""
    given = (batch for batch, _ in as_batches(data, model) or ())
    inputs = (batch["pixel_values"] if isinstance(batch, Mapping) else batch for batch in given)
    samples = list(islice(chain.from_iterable(batch.cpu().split(1) for batch in inputs), NUM_SAMPLES))
    if not samples:
        raise ValueError("there is no data to calibrate int8 on: give some images")
    if others := [sample for sample in samples if sample.shape[1:] != example.shape[1:]]:
        shapes = f"{list(others[0].shape[1:])}, but the example has {list(example.shape[1:])}"
        raise ValueError(f"a sample to calibrate int8 on has the shape {shapes}: they must match")
    return samples


@torch.no_grad()
def checked(model: nn.Module, exported: Call, example: Tensor, samples: list[Tensor]) -> float:
    """Return the relative squared error in int8 on the first samples `[1, ...]`; without samples, 0 after `_compare`.

    Raises `ValueError` if the outputs are too far off.
    """
    if not samples:
        _compare(model, exported, example)
        return 0.0
    batch = torch.cat(samples[:NUM_COMPARED])
    original, changed = model(batch).double(), exported(batch).double()
    error = ((changed - original).square().sum() / original.square().sum()).item()
    if not error < USELESS:
        raise ValueError(
            f"in int8 the outputs of {type(model).__name__} are no better than zeros (relative squared error "
            f"{error:.3g}); nothing was written: export in float32, or give calibration data like the data in use"
        )
    return error


@torch.no_grad()
def _compare(model: nn.Module, exported: Call, example: Tensor) -> None:
    """Raises `ValueError` if outputs are not one tensor, or differ by more than rounding on one of two batch sizes."""
    for batch in (example, torch.cat([example, example[:1]])):
        expected = model(batch)
        if not isinstance(expected, Tensor):
            raise ValueError(
                f"{type(model).__name__} returns a {type(expected).__name__}, but only a network that returns one "
                "tensor can be exported: wrap it in a module that picks one"
            )
        difference, allowed = (exported(batch) - expected).abs().max(), TOLERANCE * expected.abs().max()
        if not difference <= allowed:
            raise ValueError(
                f"outputs of the exported {type(model).__name__} differ from the network's by up to {difference:.3g} "
                f"on {len(batch)} inputs, but only {allowed:.3g} is allowed; nothing was written. Check `forward` for "
                "randomness or dependence on the batch size"
            )
