"""Networks in half precision, while they are trained."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Literal

import torch
from torch import Tensor, nn

HALVES: dict[torch.dtype, Literal["bfloat16", "float16"]] = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


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
