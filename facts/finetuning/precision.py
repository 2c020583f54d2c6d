"""Networks in half precision, while they are trained."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

HALVES: dict[torch.dtype, Literal["bfloat16", "float16"]] = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Hold weights in half precision as float32 within the block: rounding would swallow small steps."""
    types = {name: tensor.dtype for name, tensor in model.state_dict().items() if tensor.dtype in HALVES}
    if types:
        model.float()
    yield
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in types:
            tensor.data = tensor.data.to(types[name])
