"""Tensors in a file and in a network: names, shapes and types."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

MOST_HEADER = 2**23  # bytes
MOST_TENSORS = 2**16
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BYTES = {"I8": torch.int8, "U8": torch.uint8}  # of quantized weights


class SavedTensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: str  # safetensors' name of it


def read_header(path: Path) -> dict[str, SavedTensor]:
    """Read names, shapes and types. Raises `ValueError` if the file is incomplete or lists too many tensors."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if MOST_HEADER < size <= path.stat().st_size:
        raise ValueError(f"{path} has a header of {size:,} bytes, and {MOST_HEADER:,} are allowed: fetch it again")
    try:
        with safe_open(path, "pt") as file:
            names = file.keys()
            if len(names) > MOST_TENSORS:
                raise ValueError(f"{path} has {len(names):,} tensors, and {MOST_TENSORS:,} are allowed: fetch it again")
            slices = ((name, file.get_slice(name)) for name in names)
            return {name: SavedTensor(tuple(part.get_shape()), part.get_dtype()) for name, part in slices}
    except (SafetensorError, RuntimeError) as error:  # the latter if it cannot be mapped into memory
        raise ValueError(f"{path} is no whole safetensors file ({error}); save or fetch it again") from error


def misfits(model: nn.Module, found: dict[str, SavedTensor]) -> list[str]:
    """List the differences in names, shapes and kinds of numbers between a file and a network.

    Of a shared tensor, the file holds one copy under any of its names.
    """
    expected = model.state_dict(keep_vars=True)
    held = {id(expected[name]) for name in found.keys() & expected.keys()}
    misfits = [f"{name} is unexpected" for name in found.keys() - expected.keys()]
    for name, tensor in expected.items():
        if name not in found:
            misfits += [f"{name} is missing"] if id(tensor) not in held else []
        elif found[name].shape != tuple(tensor.shape):
            misfits.append(f"{name}: {found[name].shape} instead of {tuple(tensor.shape)}")
        elif not _is_of_kind(found[name].dtype, tensor):
            misfits.append(f"{name}: {found[name].dtype} instead of {tensor.dtype}")
    return sorted(misfits)


def _is_of_kind(dtype: str, tensor: Tensor) -> bool:
    """Floats of any size stand for each other; the bytes of quantized weights only for bytes of the same sign."""
    if tensor.dtype in BYTES.values():
        return BYTES.get(dtype) == tensor.dtype
    return (dtype in FLOATS) == tensor.is_floating_point()


def unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Floating-point buffers that are in no file: the network computes them when it is built."""
    saved = model.state_dict().keys()
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in buffers if name not in saved and buffer.is_floating_point()}


def types_of_buffers(model: nn.Module) -> dict[str, Any]:
    """Types of the unsaved buffers that are not float32, which most networks compute them in."""
    names = {dtype: name for name, dtype in FLOATS.items()}
    types = {name: names[buffer.dtype] for name, buffer in unsaved_buffers(model).items()}
    return {name: kind for name, kind in types.items() if kind != "F32"}
