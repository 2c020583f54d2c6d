"""Augmented training batches, each determined by its number alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import timm.data
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from facts.tasks.classification.base import Batch
from facts.tasks.classification.image_batches import Decoded, collate, note_corrupt
from facts.tasks.classification.imagenet_files import ImageFiles
from facts.tasks.classification.imagenet_files.base import first_few
from facts.utils.random import seed_of, seeded


@dataclass(frozen=True)
class AugmentedBatches(Dataset):
    """Full batches, with the names of images that could not be decoded, by number.

    The order of the images is drawn from `seed`, the augmentation of a batch from `seed` and its number. A smaller last
    batch is left out, as in DeiT.
    """

    files: ImageFiles
    transform: Callable[[Image.Image], Tensor]
    mixup: timm.data.Mixup | None
    batch_size: int
    seed: tuple[int, ...]

    @cached_property
    def order(self) -> Tensor:
        return torch.randperm(len(self.files), generator=torch.Generator().manual_seed(seed_of(*self.seed)))

    def __len__(self) -> int:
        return len(self.files) // self.batch_size

    def __getitem__(self, number: int) -> tuple[Batch, list[str]]:
        images, positions = Decoded(self.files, self.transform), self.order[number * self.batch_size :]
        with seeded(*self.seed, number):
            batch, corrupt = collate([images[position] for position in positions[: self.batch_size].tolist()])
            if batch is None:
                raise ValueError(
                    f"no image of a training batch can be decoded: {first_few(corrupt)}; fetch them again, or raise "
                    "batch_size"
                )
            return self._mixed(batch), corrupt

    def _mixed(self, batch: Batch) -> Batch:
        """Mix the images in pairs, if there is a `mixup`; an image without a partner is dropped."""
        images, labels = batch
        even = len(images) // 2 * 2
        return self.mixup(images[:even], labels[:even]) if self.mixup else batch


@dataclass(frozen=True)
class TrainingBatches:
    """Batches of some `numbers`; a slice has the same batches and leaves the others undecoded.

    Images that cannot be decoded are left out and logged. Raises `ValueError` if there are too many.
    """

    batches: AugmentedBatches
    num_workers: int
    numbers: range
    corrupt: set[str] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, part: slice) -> "TrainingBatches":
        return replace(self, numbers=self.numbers[part])

    def __iter__(self) -> Iterator[Batch]:
        loader = DataLoader(
            self.batches,
            batch_size=None,  # an item is a batch already
            sampler=self.numbers,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # else the loader would draw from the global generator
        )
        for batch, corrupt in loader:
            note_corrupt(corrupt, self.corrupt, len(self.batches.files))
            yield tuple(batch)
