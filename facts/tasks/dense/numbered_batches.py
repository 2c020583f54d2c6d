"""Batches of the datasets of OpenMMLab, each determined by its number alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from facts.utils.random import seeded


@dataclass(frozen=True)
class Groups(Dataset):
    """Items of a dataset by the number of their batch. Random transforms depend on `seed` and the number."""

    items: Dataset
    indices: Sequence[int]
    batch_size: int
    seed: tuple[Any, ...]

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __getitem__(self, number: int) -> list[Any]:
        start = number * self.batch_size
        with seeded(*self.seed, number):
            return [self.items[index] for index in self.indices[start : start + self.batch_size]]


@dataclass(frozen=True)
class NumberedBatches:
    """Batches of some `numbers`, made by `prepare` from groups of items; a slice has the same batches."""

    groups: Groups
    prepare: Callable[[list[Any]], tuple[Any, Any]]
    content_key: str
    num_workers: int
    numbers: range

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, part: slice) -> "NumberedBatches":
        return replace(self, numbers=self.numbers[part])

    def shard(self, rank: int, size: int) -> "NumberedBatches":
        """Every `size`-th batch from number `rank` on; the others are not read."""
        return self[rank::size]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        loader = DataLoader(
            self.groups,
            batch_size=None,  # an item is a batch already
            sampler=self.numbers,
            num_workers=self.num_workers,
            collate_fn=_unchanged,
            generator=torch.Generator(),  # else the loader would draw from the global generator
        )
        return map(self.prepare, loader)


def _unchanged(items: list[Any]) -> list[Any]:
    return items
