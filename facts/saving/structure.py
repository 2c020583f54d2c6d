"""Names, shapes and types of the tensors in a file, and how they fit a network."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from facts.modules.forms import Layout, PivotedLinear
from facts.modules.networks import tensors_of
from facts.utils.batches import described

MOST_HEADER = 2**23  # bytes
RESERVED = "__metadata__"
FLOATS = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz},
}
DTYPES = {
    **FLOATS,
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "C64": torch.complex64},
}


def layouts_of(model: nn.Module) -> dict[str, Layout]:
    """List the layouts of the pivoted layers."""
    return {name: module.layout for name, module in model.named_modules() if isinstance(module, PivotedLinear)}


def refuse_unsavable(model: nn.Module) -> None:
    """Raises `ValueError` for a tensor of a type, layout or value that safetensors or the manifest cannot hold."""
    saved = tensors_of(model)
    if RESERVED in saved:
        raise ValueError(f"safetensors keeps the name {RESERVED} for itself: rename this tensor of the network")
    for name, tensor in (saved | unsaved_buffers(model)).items():
        plain = not is_traceable_wrapper_subclass(tensor.data) and tensor.layout == torch.strided and not tensor.is_meta
        if tensor.dtype not in DTYPES.values() or not plain:
            types = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())
            raise ValueError(
                f"{type(model).__name__} cannot be saved, since {name} is {described(tensor)}, "
                f"{type(tensor.data).__name__}, {tensor.layout}, {tensor.device}: make it a dense tensor of {types}"
            )
    refuse_wrong_values(model, saved, type(model).__name__, "change it, or store a type of wider range")


def refuse_wrong_values(
    model: nn.Module, tensors: Mapping[str, Tensor], place: Path | str, remedy: str = "save or fetch the network again"
) -> None:
    """Raises `ValueError` for `tensors` that a network cannot have, whatever values are in its own."""
    for name, own in tensors_of(model).items():
        if isinstance(own, nn.Parameter) and name in tensors and not tensors[name].isfinite().all():
            raise ValueError(f"{place}: {name} holds NaN or infinity; {remedy}")
    for name, layout in layouts_of(model).items():
        order = tensors[f"{name}.order"] if layout.startswith("scattered") else None
        if order is not None and not order.sort().values.equal(torch.arange(len(order), device=order.device)):
            raise ValueError(f"{place}: {name}.order is not a permutation; {remedy}")


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return each tensor that a file of the network holds, once, contiguous, in memory of its own."""
    named = {id(tensor): (name, tensor.detach()) for name, tensor in sorted(tensors_of(model).items(), reverse=True)}
    names, tensors = zip(*named.values(), strict=True)
    return {name: each.contiguous() for name, each in zip(names, apart(tensors), strict=True)}


def apart(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield each tensor, or a copy of one that is part of a larger one, expanded or shares memory with an earlier."""
    seen = set()
    for tensor in tensors:
        memory = tensor.untyped_storage()
        yield tensor.clone() if memory.nbytes() != tensor.nbytes or memory.data_ptr() in seen else tensor
        seen.add(memory.data_ptr())


def read_header(path: Path) -> dict[str, Tensor]:
    """Read the shapes and types in a file, as tensors on the meta device.

    Raises `FileNotFoundError`, or `ValueError` if the file is incomplete or its header too large.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: save or fetch the network again")
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if MOST_HEADER < size <= path.stat().st_size:
        raise ValueError(f"{path} has a header of {size:,} bytes, but only {MOST_HEADER:,} are allowed: fetch it again")
    try:
        with safe_open(path, "pt") as file:
            slices = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118, not a mapping
            sizes = {name: (part.get_shape(), DTYPES[part.get_dtype()]) for name, part in slices}
            return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in sizes.items()}
    except (SafetensorError, RuntimeError, KeyError) as error:  # RuntimeError if it cannot be mapped into memory
        raise ValueError(f"{path} is not a whole safetensors file ({error}); save or fetch it again") from error


def misfits(model: nn.Module, found: Mapping[str, Tensor]) -> list[str]:
    """List the differences in names, shapes and types between a file and a network. All float types count as equal.

    The file holds one copy of a shared tensor, under any of its names.
    """
    expected = tensors_of(model)
    held = {id(expected[name]) for name in found.keys() & expected.keys()}
    misfits = [f"{name} is unexpected" for name in found.keys() - expected.keys()]
    for name, tensor in expected.items():
        if name not in found:
            misfits += [f"{name} is missing"] if id(tensor) not in held else []
        elif found[name].shape != tensor.shape:
            misfits.append(f"{name}: {tuple(found[name].shape)} instead of {tuple(tensor.shape)}")
        elif found[name].dtype != tensor.dtype and not (found[name].is_floating_point() and tensor.is_floating_point()):
            misfits.append(f"{name}: {found[name].dtype} instead of {tensor.dtype}")
    return sorted(misfits)


def convert(model: nn.Module, saved: Mapping[str, Tensor], buffers: Mapping[str, str]) -> None:
    """Give each float tensor its type in the file or, if it is not saved, in `buffers` (default: float32)."""
    unsaved = unsaved_buffers(model)
    types = {name: FLOATS[buffers.get(name, "F32")] for name in unsaved}
    types |= {name: tensor.dtype for name, tensor in saved.items()}
    for name, tensor in (tensors_of(model) | unsaved).items():
        if name in types and tensor.is_floating_point():
            tensor.data = tensor.data.to(types[name])


def types_of_buffers(model: nn.Module) -> dict[str, Any]:
    """List the types of the unsaved buffers that are not float32, as most networks compute them."""
    names = {dtype: name for name, dtype in FLOATS.items()}
    return {name: names[each.dtype] for name, each in unsaved_buffers(model).items() if each.dtype != torch.float32}


def unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """List the floating-point buffers that no file holds: the network computes them when it is built."""
    saved = model.state_dict().keys()
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in buffers if name not in saved and buffer.is_floating_point()}
