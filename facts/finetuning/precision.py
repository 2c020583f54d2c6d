"""Precision of training: the type of its products, and that of the weights meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

Precision = Literal["float32", "bfloat16", "float16"]
HALVES: dict[torch.dtype, Precision] = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def fast_precision(device: torch.device) -> Precision:
    """bfloat16 where the device has instructions for it: its products take half of the time of float32's, or less."""
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    able: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # which PyTorch 2.5 does not have
    return "bfloat16" if device.type == "cpu" and (able.get("avx512_bf16") or able.get("amx_bf16")) else "float32"


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Hold tensors in half precision as float32 within the block: rounding would swallow small steps."""
    types = {name: tensor.dtype for name, tensor in _tensors(model).items() if tensor.dtype in HALVES}
    for name, tensor in _tensors(model).items():
        if name in types:
            tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for name, tensor in _tensors(model).items():
            if name in types:
                tensor.data = tensor.data.to(types[name])


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each once, unsaved ones too."""
    return dict(chain(model.named_parameters(), model.named_buffers()))
