"""Batches of nested tensors: their size, parts, device and shares."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from facts.utils.options import first_line
from facts.utils.progress import waiting

T = TypeVar("T")

# Raised by networks for inputs of another shape, size, type or name.
MISREAD = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def to_device(value: Any, device: torch.device) -> Any:
    """Detach tensors, also those in mappings, lists and tuples, and move them to `device`."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to(device, non_blocking=True), value)


def in_parts(batch: tuple[Any, Any], num_parts: int) -> Iterator[tuple[Any, Any]]:
    """Divide `(inputs, targets)` into at most `num_parts` parts. Raises `ValueError` for a tensor without such rows."""
    if num_parts == 1:
        yield batch
        return
    total = batch_size(batch[0])
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.shape[:1] != (total,):
            kind = f"a batch of {total} samples holds a tensor of shape {list(leaf.shape)}"
            raise ValueError(f"{kind}, which has no row for each: give batches that fit the device's memory")
    step = -(-total // num_parts)
    for start in range(0, total, step):
        yield tree_map_only(Tensor, itemgetter(slice(start, start + step)), batch)


def batch_size(inputs: Any) -> int:
    """Number of samples in one batch: the first axis of its first tensor."""
    return next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)).shape[0]


def has_row_per_sample(inputs: Any) -> bool:
    """Check that a batch is a tensor, or tensors by name, with one row per sample."""
    tensors = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
    return all(isinstance(tensor, Tensor) and tensor.ndim and len(tensor) == len(tensors[0]) for tensor in tensors)


def first_sample(inputs: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor[:1], inputs)


def share(batches: Iterable[T], rank: int, size: int) -> Iterable[T]:
    """Every `size`-th batch from number `rank` on; data with a method `shard(rank, size)` need not read the others."""
    if size == 1:
        return batches
    own = getattr(batches, "shard", None)
    return own(rank, size) if own else islice(batches, rank, None, size)


@dataclass(frozen=True)
class FirstSamples:
    """The first batches of some data, until they hold at least `num_samples`."""

    batches: Iterable[tuple[Any, Any]]
    num_samples: int

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        left = self.num_samples
        for inputs, targets in self.batches:
            yield inputs, targets
            left -= batch_size(inputs)
            if left <= 0:
                return


def first_of(batches: Iterable[T]) -> T | None:
    """Read the first batch; None if there is none."""
    return next(waiting(batches), None)


def versions_of(value: Any) -> list[int]:
    """How often each tensor in nested ones was changed in place."""
    return [leaf._version for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def described(value: Any) -> str:
    """Describe a tensor, such as `float32 [4, 10]`, each entry of a mapping, and anything else by its type's name."""
    if isinstance(value, Mapping):
        return f"{type(value).__name__} of {', '.join(f'{name}: {described(each)}' for name, each in value.items())}"
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


class Refusal(ValueError):
    """An error of ours from within a network's pass, whose text says all: it is raised as it is."""


@contextmanager
def reading(model: object, inputs: Any, what: str = "a batch") -> Iterator[None]:
    """Raises a `ValueError` that says what a batch must be, if the block runs the network and it fails."""
    try:
        yield
    except (Refusal, torch.OutOfMemoryError):
        raise
    except MISREAD as error:
        if "can't allocate memory" in str(error):
            raise MemoryError(f"{first_line(error)}: give smaller batches") from error
        raise ValueError(
            f"{type(model).__name__} cannot read {what} of {described(inputs)} ({first_line(error)}): a batch has its "
            "samples along the first axis, images as [N, C, H, W] in the type of the weights; it is (inputs, targets), "
            "or a mapping if the network takes inputs by name"
        ) from error
