"""Batches that depend only on their number, in every process and after any interruption."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


@dataclass(frozen=True)
class NumberedBatches:
    """Batches at `numbers` of a dataset whose items are batches; a slice has the same batches and reads no others.

    `finish` turns an item into `(inputs, targets)` in the main process, or into None to skip the batch.
    Workers persist, since searches read the same batches repeatedly.
    """

    items: Dataset
    finish: Callable[[Any], Any]
    content_key: str
    num_workers: int
    numbers: range
    pin_memory: bool = False
    shares: dict[tuple[int, int], "NumberedBatches"] = field(default_factory=dict)

    @cached_property
    def loader(self) -> DataLoader:
        return DataLoader(
            self.items,
            batch_size=None,  # an item is already a batch
            sampler=self.numbers,
            num_workers=self.num_workers,
            collate_fn=_unchanged,
            pin_memory=self.pin_memory and torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
            generator=torch.Generator(),  # otherwise the loader draws from the global generator
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, part: slice) -> "NumberedBatches":
        return replace(self, numbers=self.numbers[part], shares={})

    def shard(self, rank: int, size: int) -> "NumberedBatches":
        """Every `size`-th batch from number `rank` on; the others are not read."""
        return self.shares.setdefault((rank, size), self[rank::size])

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch in map(self.finish, self.loader) if batch is not None)


def _unchanged(item: Any) -> Any:
    return item
