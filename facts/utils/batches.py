"""Batches of nested tensors: their size, parts and device; and batches that are read by their number."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Dataset

from facts.utils.numerics import seeded
from facts.utils.options import first_line

T = TypeVar("T")

# Raised by networks for inputs of another shape, size, type or name.
MISREAD = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Batches(Protocol):
    """Batches of `(inputs, targets)`. Slicing does not read the batches outside the slice."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[tuple[Any, Any]]: ...
    def __getitem__(self, part: slice) -> "Batches": ...


def to_device(value: Any, device: torch.device) -> Any:
    """Detach tensors, also those in mappings, lists and tuples, and move them to `device`."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to(device, non_blocking=True), value)


def in_parts(batch: tuple[Any, Any], num_parts: int) -> Iterator[tuple[Any, Any]]:
    """Divide `(inputs, targets)` into at most `num_parts` parts. Raises `ValueError` for a tensor without such rows."""
    if num_parts == 1:
        yield batch
        return
    total = batch_size(batch[0])
    for tensor in tensors_in(batch):
        if tensor.shape[:1] != (total,):
            kind = f"a batch of {total} samples holds a tensor of shape {list(tensor.shape)}"
            raise ValueError(f"{kind}, which has no row for each: give batches that fit the device's memory")
    step = -(-total // num_parts)
    for start in range(0, total, step):
        yield tree_map_only(Tensor, itemgetter(slice(start, start + step)), batch)


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors in nested mappings, lists and tuples."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def batch_size(inputs: Any) -> int:
    """Number of samples in one batch: the first axis of its first tensor."""
    return tensors_in(inputs)[0].shape[0]


def has_row_per_sample(inputs: Any) -> bool:
    """Check that a batch is a tensor, or tensors by name, with one row per sample."""
    tensors = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
    return all(isinstance(tensor, Tensor) and tensor.ndim and len(tensor) == len(tensors[0]) for tensor in tensors)


def first_sample(inputs: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor[:1], inputs)


def unchanged(item: T) -> T:
    return item


@dataclass(frozen=True)
class NumberedBatches:
    """Batches at `numbers` of a dataset whose items are batches; a part has the same batches and reads no others.

    Batches depend only on their number, in every process and after any interruption. `finish` turns an item into a
    batch in the main process, or into None to leave it out; so does `choose`, from the number and the batch. `options`
    are those of a `DataLoader`.
    """

    items: Dataset
    finish: Callable[[Any], Any]
    content_key: str | None
    numbers: Sequence[int]
    options: Mapping[str, Any] = field(default_factory=dict)
    choose: Callable[[int, Any], Any] = lambda number, batch: batch
    parts: dict[tuple[int, ...], "NumberedBatches"] = field(default_factory=dict)

    @cached_property
    def loader(self) -> DataLoader:
        return DataLoader(
            self.items,
            batch_size=None,  # an item is already a batch
            sampler=self.numbers,
            collate_fn=unchanged,
            generator=torch.Generator(),  # otherwise the loader draws from the global generator
            **self.options,
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, part: slice) -> "NumberedBatches":
        return self.at(range(len(self))[part])

    def at(self, places: Sequence[int]) -> "NumberedBatches":
        """The batches at some places; the same ones each time, since workers that persist belong to one loader."""
        numbers = [self.numbers[place] for place in places]
        return self.parts.setdefault(tuple(places), replace(self, numbers=numbers, parts={}))

    def __iter__(self) -> Iterator[Any]:
        return self._finished(self.loader)

    def one_by_one(self) -> Iterator[Any]:
        """Read the batches without workers, unless these have to prepare the dataset."""
        has_own = self.options.get("worker_init_fn") is not None
        return self._finished(self.loader if has_own else map(self.items.__getitem__, self.numbers))

    def _finished(self, items: Iterable[Any]) -> Iterator[Any]:
        for number, item in zip(self.numbers, items, strict=False):
            if (batch := self.finish(item)) is not None and (batch := self.choose(number, batch)) is not None:
                yield batch


@dataclass(frozen=True)
class Groups(Dataset):
    """Batches of a dataset: its items at the `indices` of each group, put together by `collate`.

    Random transforms depend on `seed` and the batch number.
    """

    items: Any
    indices: Sequence[Sequence[int]]
    collate: Callable[[list[Any]], Any] = unchanged
    seed: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: int) -> Any:
        at_once = getattr(self.items, "__getitems__", None)
        with seeded(*self.seed, number):
            chosen = self.indices[number]
            return self.collate(at_once(chosen) if at_once else [self.items[index] for index in chosen])


def versions_of(value: Any) -> list[int]:
    """How often each tensor in nested ones was changed in place."""
    return [tensor._version for tensor in tensors_in(value)]


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
