"""Batches of nested tensors: their size, their parts, their device."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def to_device(value: Any, device: torch.device) -> Any:
    """Move tensors, also within mappings, lists and tuples, to `device`, without the gradients that they ask for."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to(device, non_blocking=True), value)


def in_parts(batch: tuple[Any, Any], num_parts: int) -> Iterator[tuple[Any, Any]]:
    """Divide `(inputs, targets)` into at most `num_parts` parts, every tensor along its first axis.

    Raises `ValueError` for a tensor without one row a sample.
    """
    if num_parts == 1:
        yield batch
        return
    total = batch_size(batch[0])
    step = -(-total // num_parts)
    for start in range(0, total, step):
        yield tree_map_only(Tensor, partial(_rows, start=start, end=start + step, total=total), batch)


def _rows(tensor: Tensor, start: int, end: int, total: int) -> Tensor:
    if tensor.ndim == 0 or len(tensor) != total:
        raise ValueError(
            f"a batch of {total} samples holds a tensor of shape {list(tensor.shape)}, which cannot be divided into "
            "the parts that fit the device's memory; lower the batch size instead"
        )
    return tensor[start:end]


def batch_size(inputs: Any) -> int:
    """Number of samples in one batch: the first axis of its first tensor."""
    if isinstance(inputs, torch.Tensor):
        return inputs.shape[0]
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    return batch_size(next(iter(values)))


def described(value: Any) -> str:
    """The type and shape of a tensor, such as `float32 [4, 10]`; the type's name of anything else."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
