"""Batches of nested tensors: their size, parts, device and memory, and each process's share of them."""

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from facts.utils import distributed
from facts.utils.progress import with_progress
from facts.utils.stopwatch import waiting

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_PARTS = 64


def to_device(value: Any, device: torch.device) -> Any:
    """Detach tensors, also those in mappings, lists and tuples, and move them to `device`."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to(device, non_blocking=True), value)


def in_parts(batch: tuple[Any, Any], num_parts: int) -> Iterator[tuple[Any, Any]]:
    """Divide `(inputs, targets)` into at most `num_parts` parts, every tensor along its first axis.

    Raises `ValueError` for a tensor without one row per sample.
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


def has_row_per_sample(inputs: Any) -> bool:
    """Check that a batch is a tensor, or tensors by name, with one row per sample."""
    tensors = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
    return all(isinstance(tensor, Tensor) and tensor.ndim and len(tensor) == len(tensors[0]) for tensor in tensors)


def first_sample(inputs: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor[:1], inputs)


def shared(batches: Iterable[T], what: str = "", sums: Iterable[Tensor] | None = None) -> Iterator[T]:
    """Yield this process's share of the batches; after the last one, add up `sums` over all processes, in place.

    If `what` names the work, its progress is shown.
    """
    own = distributed.shard(batches)
    yield from with_progress(own, what) if what else own
    if sums is not None:  # otherwise the processes do not meet here
        distributed.all_reduce(sums)


def gathered(own: list[T]) -> list[T]:
    """Join the values of all processes, one per batch, in the order of the data."""
    turns = zip_longest(*distributed.all_gather(own))
    return [value for turn in turns for value in turn if value is not None]


def first_of(batches: Iterable[T]) -> T | None:
    """Read the first batch, on the main process for all; None if there is none."""
    return distributed.on_main_rank(lambda: next(waiting(batches), None))


def described(value: Any) -> str:
    """Describe a tensor by type and shape, such as `float32 [4, 10]`, and anything else by its type's name."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def within_memory(run: Callable[[int], T], halve_batches: bool) -> T:
    """Call `run(num_parts)` with whole batches, then in more and more parts until they fit the device's memory.

    Raises a `MemoryError` that says how to use less.
    """
    num_parts = 1
    while True:
        try:
            return distributed.on_all_ranks(partial(run, num_parts))
        except torch.OutOfMemoryError as error:
            if not halve_batches or num_parts == MAX_PARTS:
                raise MemoryError(
                    f"the device ran out of memory with batches in {num_parts} parts ({error}); lower the batch size, "
                    'give MemoryPolicy(moments="host") or MemoryPolicy(checkpoint_blocks=True), or let '
                    "MemoryPolicy(halve_batches=True) divide the batches"
                ) from error
        num_parts *= 2
        gc.collect()  # errors and their frames can refer to each other, and to tensors on the device
        torch.cuda.empty_cache()
        log.warning("out of memory: starting the pass again with each batch in %d parts", num_parts)
