"""Eight-bit weights and activations of an ONNX file, and the samples that calibrate them."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from facts.calibration.data import as_batches
from facts.utils.silence import silence

NUM_SAMPLES = 300  # NNCF's default
LAYERS = ["Conv", "Gemm", "MatMul"]


class Reader:
    """Inputs as ONNX Runtime's calibration expects them: one at a time, then None."""

    def __init__(self, samples: Iterable[Tensor]):
        self.inputs: Iterator[dict[str, Any]] = iter([{"input": sample.numpy()} for sample in samples])

    def get_next(self) -> dict[str, Any] | None:
        return next(self.inputs, None)


def quantize_onnx(file: Path, samples: Iterable[Tensor], out: Path) -> None:
    """Round the weights of linear layers and convolutions, one scale per channel, and their inputs, one per tensor.

    Everything else stays in float32, such as attention's products. So do outputs: if they are rounded too, some
    releases of ONNX Runtime fuse layers incorrectly. Uses its static quantization in the default format.
    """
    from onnxruntime.quantization import quantize_static

    with silence():  # it recommends steps that change nothing in such a file
        quantize_static(
            file,
            out,
            Reader(samples),
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
