"""Export to files that run without this package, ONNX, OpenVINO's and `.pt2`, and speed in each runtime."""

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from facts.calibration.data import Data
from facts.cost.timing import DEFAULT_TIMING, TimingPolicy
from facts.modules.linear_calls import copy_with
from facts.modules.networks import OneTensor, is_transformers, reads_tokens, run, without_autocast
from facts.modules.tokens import Merge
from facts.result import CompressionResult
from facts.utils.batches import described
from facts.utils.files import replacing
from facts.utils.options import first_line, needing
from facts.utils.progress import progress_of, silence, with_progress

Call = Callable[[Tensor], Any]

OPSET = 20  # torch's own default; read by ONNX Runtime since 1.17 and by TensorRT since 10.0
TOLERANCE = 1e-4  # relative to the largest output
NUM_SAMPLES = 300  # that calibrate int8, NNCF's default
NUM_COMPARED = 32
USELESS = 1.0  # relative squared error of outputs that are all zero
LAYERS = ["Conv", "Gemm", "MatMul"]
WIDEST = 128  # times the root mean square of inputs may their range be: then a step of 8 bits is half of it
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COMPILERS: dict[str, dict[str, Any] | None] = {  # arguments of torch.compile
    "PyTorch": None,
    "PyTorch compiled": {},
    "CUDA graph": {"mode": "reduce-overhead"},
    "PyTorch fused": {"options": {"b2b_gemm_pass": True}},  # a low-rank layer's two products in one Triton kernel
}


def export_onnx(
    compressed: CompressionResult | nn.Module, example: Tensor, path: Path | str, *, int8: Iterable[Any] | None = None
) -> float:
    """Write the network as ONNX, opset 20: `input [N, ...]` to `output`, for any N, otherwise shaped as `example`.

    `output` of a network of transformers is its logits, or else the features of the whole image (`image_embeds` or
    `pooler_output`).
    In float32, ONNX Runtime must match PyTorch's outputs to 1e-4 of the largest, on the batch `example` and with one
    more sample; otherwise nothing is written and `ValueError` is raised. `int8` is data as for `facts.prepare`; 300 of
    its samples calibrate ONNX Runtime's static quantization. Returns the relative squared error of the outputs on 32 of
    them (0 in float32). Weights above 1.5 GB are stored as `<path>.data`. Raises `ModuleNotFoundError` without
    `facts[export]`, and `ValueError` for a network that is not in float32, for unsuitable data, or if the outputs in
    int8 are no better than zeros.
    """
    refuse_without_onnx()
    refuse_other_endings(path, ".onnx")
    model, example = on_cpu(compressed, example)
    if other := {str(parameter.dtype) for parameter in model.parameters()} - {"torch.float32"}:
        raise ValueError(f"ONNX is written in float32, and the network is in {', '.join(other)}: use `model.float()`")
    samples = [] if int8 is None else samples_of(int8, model, example)
    options: dict[str, Any] = {"dynamo": True, "verbose": False, "opset_version": OPSET}
    options["custom_translation_table"] = {torch.ops.aten.sort.stable: _stable_sort}
    if isinstance(model, OneTensor):
        model.network.set_attn_implementation("eager")  # others cannot be converted for Swin
    with without_autocast(example.device), replacing(Path(path)) as staged, TemporaryDirectory() as temporary:
        program = torch.onnx.export(_trace(model, example), input_names=["input"], output_names=["output"], **options)
        assert program is not None  # with dynamo
        program.save(written := Path(temporary, "model.onnx") if samples else staged)
        if samples:
            _quantize(written, samples, staged)
        return verified(model, onnx_call(staged), example, samples)


def refuse_other_endings(path: Path | str, *endings: str) -> None:
    """Raises `ValueError` for a file whose name says that its format is another one."""
    if Path(path).suffix not in endings:
        raise ValueError(f"{Path(path).name} must end in {' or '.join(endings)}")


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
    refuse_other_endings(path, ".pt2")
    model, example = on_cpu(compressed, example)
    with without_autocast(example.device), replacing(Path(path)) as staged:
        buffer = io.BytesIO()  # torch's own writer ends the process if the disk is full
        torch.export.save(_trace(model, example), buffer)
        staged.write_bytes(buffer.getbuffer())
        _compare(model, torch.export.load(staged).module(), example)


def on_cpu(compressed: CompressionResult | nn.Module, example: Tensor) -> tuple[nn.Module, Tensor]:
    """Copy the network, in evaluation mode, and the batch to the CPU, so that the file depends on no device."""
    if not isinstance(example, Tensor) or example.ndim == 0 or len(example) == 0:
        got = f"{type(example).__name__} of shape {list(getattr(example, 'shape', []))}"
        raise ValueError(f"the example must be a batch of at least one input, as one tensor [N, ...], got a {got}")
    if example.isnan().any():
        raise ValueError("the example holds NaN, so outputs cannot be compared: give a batch of real inputs")
    model = compressed.model if isinstance(compressed, CompressionResult) else compressed
    if not isinstance(model, nn.Module) or any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"a result or a network with weights can be exported, not this {type(model).__name__}")
    model = copy_with(model).cpu().eval().requires_grad_(False)  # with gradients, attention is traced otherwise
    return OneTensor(model) if is_transformers(model) else model, example.detach().cpu()


def _trace(model: nn.Module, example: Tensor) -> ExportedProgram:
    """Trace the graph for any batch size, without the example's data and this machine's source files.

    Raises `ValueError` if the network cannot be run or traced, or does not return one tensor.
    """
    batch = torch.cat([example, example])  # torch would treat one sample as a constant batch size
    try:
        with torch.no_grad():
            outputs = model(batch)  # whose errors say more
        program = torch.export.export(model, (batch,), dynamic_shapes=({0: Dim("batch")},))
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # from anybody's code
        raise ValueError(
            f"{type(model).__name__} cannot be exported for batches like the example, {described(example)} "
            f"({first_line(error)}): give a batch that it reads; `forward` must not depend on values or the batch size"
        ) from error
    if not isinstance(outputs, Tensor):
        raise ValueError(
            f"{type(model).__name__} returns a {type(outputs).__name__}, but only a network that returns one "
            "tensor can be exported: wrap it in a module that picks one"
        )
    program.example_inputs = None
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def _stable_sort(values: Any, *, stable: bool, dim: int = -1, descending: bool = False) -> Any:
    """PyTorch's stable sort in ONNX, whose TopK takes equal values in the order of their positions."""
    opset: Any = import_module("onnxscript").opset20
    size = opset.Gather(opset.Shape(values), opset.Constant(value_ints=[dim]))
    return opset.TopK(values, size, axis=dim, largest=int(descending))


def _of_merging(network: Any) -> list[str]:
    """Names of the nodes in an ONNX network that choose and merge tokens: one wrong digit would choose others."""
    merge = f"{Merge.__module__}.{Merge.__name__}"
    scopes = {node.name: {each.key: each.value for each in node.metadata_props} for node in network.graph.node}
    return [name for name, each in scopes.items() if merge in each.get("pkg.torch.onnx.class_hierarchy", "")]


def _with_outliers(network: Any, folder: Path, samples: list[Tensor]) -> list[str]:
    """Names of the layers in an ONNX network in `folder` whose inputs are mostly small beside their range."""
    import onnx
    import onnxruntime

    constants = {each.name for each in network.graph.initializer}
    layers = [node for node in network.graph.node if node.op_type in LAYERS and node.input[1] in constants]
    inside = list(dict.fromkeys(node.input[0] for node in layers if node.input[0] != "input"))
    network.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inside)
    onnx.save(network, file := folder / "inputs_of_layers.onnx")
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    least, most, squares = (np.zeros((len(samples), len(inside))) for _ in range(3))
    for number, sample in enumerate(samples):
        values = session.run(inside, {"input": sample.numpy()})
        least[number], most[number] = [each.min() for each in values], [each.max() for each in values]
        squares[number] = [np.square(each, dtype=np.float64).mean() for each in values]
    is_wide = most.max(axis=0) - least.min(axis=0) > WIDEST * np.sqrt(squares.mean(axis=0))
    wide = {name for name, each in zip(inside, is_wide, strict=True) if each}
    return [node.name for node in layers if node.input[0] in wide]


def _quantize(file: Path, samples: list[Tensor], out: Path) -> None:
    """Round the weights of linear layers and convolutions, one scale per channel, and their inputs, one per tensor.

    Everything else stays in float32, such as attention's products, and layers whose inputs have outliers. So do
    outputs: if they are rounded too, some releases of ONNX Runtime fuse layers incorrectly. Uses its static
    quantization in the default format.
    """
    import onnx
    from onnxruntime.quantization import quantize_static

    def inputs() -> Iterator[dict[str, Any]]:
        for done, sample in enumerate(samples):
            show(done, len(samples))
            yield {"input": sample.numpy()}

    network = onnx.load(file, load_external_data=False)
    exact = [*_of_merging(network), *_with_outliers(network, file.parent, samples[:NUM_COMPARED])]
    reader: Any = SimpleNamespace(get_next=partial(next, inputs(), None))
    with progress_of("int8") as show, silence():  # it recommends steps that change nothing in such a file
        quantize_static(
            file,
            out,
            reader,
            op_types_to_quantize=LAYERS,
            nodes_to_exclude=exact,
            per_channel=True,
            reduce_range=True,  # to seven bits: without VNNI, CPUs add two products in 16 bits; eight bits overflow
            use_external_data_format=file.with_name(f"{file.name}.data").exists(),
            extra_options={"MatMulConstBOnly": True, "OpTypesToExcludeOutputQuantization": LAYERS},
        )


def samples_of(data: Iterable[Any], model: nn.Module, example: Tensor) -> list[Tensor]:
    """300 samples `[1, ...]`. Raises `ValueError` if there are none, or shapes differ from the example's."""
    given = (batch for batch, _ in Data.of(data, model, "int8 calibration").few_samples(NUM_SAMPLES))
    inputs = (batch["pixel_values"] if isinstance(batch, Mapping) else batch for batch in given)
    samples = list(islice(chain.from_iterable(batch.cpu().split(1) for batch in inputs), NUM_SAMPLES))
    wanted = described(example[:1])
    if others := [sample for sample in samples if described(sample) != wanted]:
        raise ValueError(f"a sample to calibrate int8 on is {described(others[0])}, but the example's are {wanted}")
    if not all(sample.isfinite().all() for sample in samples):
        raise ValueError("a sample to calibrate int8 on has NaN or infinity: leave it out")
    return samples


@torch.no_grad()
def verified(model: nn.Module, exported: Call, example: Tensor, samples: list[Tensor]) -> float:
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
    """Raises `ValueError` if outputs differ by more than rounding on one of two batch sizes."""
    for batch in (example, torch.cat([example, example[:1]])):
        pair = model(batch), exported(batch)
        expected, found = (each.int() if each.dtype == torch.bool else each for each in pair)
        errors = (found - expected).abs().where(found != expected, 0)  # equal infinities differ by NaN
        finite = expected.abs().where(expected.isfinite(), 0)
        difference, largest = (F.pad(each.flatten(), (0, 1)).max() for each in (errors, finite))  # 0 of no outputs
        allowed = TOLERANCE * largest
        if not difference <= allowed:
            raise ValueError(
                f"outputs of the exported {type(model).__name__} differ from the network's by up to {difference:.3g} "
                f"on {len(batch)} inputs, but only {allowed:.3g} is allowed; nothing was written. Check `forward` for "
                "randomness or dependence on the batch size"
            )


def export_openvino(
    compressed: CompressionResult | nn.Module, example: Tensor, path: Path | str, *, int8: Iterable[Any] | None = None
) -> float:
    """Write the network to `path`, an `.xml`, and a `.bin` next to it, in float32 or calibrated int8.

    `int8` is data as for `facts.prepare`, with inputs shaped as `example`, of which 300 samples are used. NNCF's
    post-training quantization rounds weights and activations, with its scheme for transformers. Returns the relative
    squared error of the outputs on 32 samples (0 in float32, where outputs are compared as in `export_onnx`). Raises
    `ModuleNotFoundError` without `facts[openvino]`, `ValueError` for unsuitable data or int8 outputs as bad as zeros.
    """
    path = Path(path)
    openvino = import_openvino(int8=int8 is not None)
    refuse_without_onnx()
    refuse_other_endings(path, ".xml")
    model, example = on_cpu(compressed, example)
    samples = [] if int8 is None else samples_of(int8, model, example)
    with without_autocast(example.device), replacing(path) as staged, TemporaryDirectory() as temporary:
        file, inputs = Path(temporary, "model.onnx"), Path(temporary, "inputs.npy")
        export_onnx(model, example, file)
        if samples:
            np.save(inputs, torch.cat(samples).numpy())
            # In a new process: NNCF changes logging globally, and processes that fork after its import may crash.
            command = [sys.executable, "-m", __name__, *map(str, (file, inputs, staged))]
            with progress_of("int8"):
                done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                reasons = done.stderr.strip().splitlines() or ["its process was killed, often for lack of memory"]
                raise RuntimeError(f"NNCF could not quantize the network: {reasons[-1]}")
        else:
            openvino.save_model(openvino.Core().read_model(file), staged, compress_to_fp16=False)
        return verified(model, openvino_call(staged), example, samples)


def import_openvino(int8: bool = False) -> Any:
    """Import OpenVINO without its telemetry, which would store an identifier of this machine and call home."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    with needing("openvino", "OpenVINO export"):
        if int8 and find_spec("nncf") is None:
            raise ModuleNotFoundError(name="nncf")
        return import_module("openvino")


def openvino_call(file: Path | str, precision: torch.dtype = torch.float32) -> Call:
    """Load a file as a function of a batch on the CPU, with torch's threads; all but integers is in `precision`."""
    hint = "bf16" if precision == torch.bfloat16 else "f32"
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": hint}
    compiled = import_openvino().Core().compile_model(file, "CPU", settings)
    return lambda batch: torch.from_numpy(next(iter(compiled(batch.numpy()).values())).copy())


def quantize(file: str, inputs: str, out: str) -> None:
    """Quantize the network in an ONNX file, calibrated on inputs `[N, ...]` in an array, and write OpenVINO's files."""
    os.environ.setdefault("NNCF_CI", "1")  # no telemetry from NNCF either
    openvino, nncf = import_openvino(), import_module("nncf")
    samples, network = np.load(inputs), openvino.Core().read_model(file)
    exact = {*_of_merging(import_module("onnx").load(file, load_external_data=False))}
    names = [op.get_friendly_name() for op in network.get_ops() if op.get_friendly_name() in exact]
    network = nncf.quantize(
        network,
        nncf.Dataset(range(len(samples)), lambda index: samples[index : index + 1]),
        preset=nncf.QuantizationPreset.MIXED,
        model_type=nncf.ModelType.TRANSFORMER,
        ignored_scope=nncf.IgnoredScope(names=names),
        subset_size=len(samples),
    )
    openvino.save_model(network, out, compress_to_fp16=False)


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
            able = import_openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
            found += ["OpenVINO, float32", *(["OpenVINO, bfloat16"] if "BF16" in able else [])]
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
    chosen = known if runtimes is None else list(dict.fromkeys(runtimes))
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"there is no runtime {unknown[0]!r} here: choose from {'; '.join(known)}")
    with TemporaryDirectory() as temporary:
        folders = {name: Path(temporary, str(number)) for number, name in enumerate(networks)}
        calls = dict[str, Call]()
        for runtime, name in with_progress(list(product(chosen, networks)), "loading", ": ".join):
            calls[f"{runtime}: {name}"] = loaded(networks[name], runtime, batch, folders[name], int8)
        with torch.cuda.device_of(batch):
            whole, single = (
                timing.times({key: partial(call, inputs) for key, call in calls.items()})
                for inputs in (batch, batch[:1])
            )
    return [
        RuntimeSpeed(name, runtime, len(batch) / whole[key].median, whole[key].spread, single[key].median)
        for (runtime, name), key in zip(product(chosen, networks), calls, strict=True)
    ]


def loaded(network: nn.Module, runtime: str, batch: Tensor, folder: Path, int8: Iterable[Any] | None) -> Call:
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
    return openvino_call(file, FORMATS.get(number_format, torch.float32))


def _in_pytorch(network: nn.Module, dtype: torch.dtype, compiler: dict[str, Any] | None) -> Call:
    """Make a function of a batch, with weights and images in `dtype`; compiled unless `compiler` is None."""
    model: Any = copy_with(network).to(dtype).eval()
    model = model if compiler is None else torch.compile(model, dynamic=False, **compiler)

    @torch.inference_mode()
    def call(batch: Tensor) -> Any:
        return run(model, batch.to(dtype) if batch.is_floating_point() else batch)

    return call


if __name__ == "__main__":
    quantize(*sys.argv[1:])
