"""Batches of decoded images, without those that cannot be decoded."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from facts.tasks.classification.base import Batch
from facts.tasks.classification.crops import Crops
from facts.tasks.classification.imagenet_files import ImageFiles
from facts.tasks.classification.imagenet_files.base import first_few
from facts.tasks.classification.pictures import decode

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decoded(Dataset):
    """Transformed images with their labels; in place of an image that cannot be decoded, its name.

    With `crops`, each image is decoded once.
    """

    files: ImageFiles
    transform: Callable[[Image.Image], Tensor]
    crops: Crops | None = None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | str:
        name, label, crops = self.files.names[index], int(self.files.labels[index]), self.crops
        stamp = self.files.stamp(index) if crops else 0
        if crops and (crop := crops.read(name, stamp)):
            return crops.to_tensor(crop), label
        data = self.files.read(index)
        try:
            image = decode(data)
        except ValueError:
            return name
        if crops is None:
            return self.transform(image), label
        crop = crops.geometry(image)
        crops.write(name, stamp, crop)
        return crops.to_tensor(crop), label


def collate(samples: list[tuple[Tensor, int] | str]) -> tuple[Batch | None, list[str]]:
    """Make a batch of the images, if any, and list the names of those that could not be decoded."""
    images = [sample for sample in samples if not isinstance(sample, str)]
    return default_collate(images) if images else None, [sample for sample in samples if isinstance(sample, str)]


@dataclass(frozen=True)
class ImageBatches:
    """Batches under a key that avoids hashing the pixels. `make_loader` is called at the first read.

    It makes the loader of every `size`-th batch from number `rank` on, so that several processes can share the work.
    Images that cannot be decoded are left out and logged, each once. Raises `ValueError` for more than one of them if
    they exceed a thousandth of all; each of several processes counts its own.
    """

    make_loader: Callable[[int, int], DataLoader]
    content_key: str
    rank: int = 0
    size: int = 1
    corrupt: set[str] = field(default_factory=set)
    shares: dict[tuple[int, int], "ImageBatches"] = field(default_factory=dict)

    @cached_property
    def loader(self) -> DataLoader:
        return self.make_loader(self.rank, self.size)

    def __len__(self) -> int:
        return len(self.loader)

    def shard(self, rank: int, size: int) -> "ImageBatches":
        """Every `size`-th batch from number `rank` on, by persistent workers; the others are not decoded."""
        return self.shares.setdefault((rank, size), replace(self, rank=rank, size=size))

    def __iter__(self) -> Iterator[Batch]:
        for batch, corrupt in self.loader:
            total = len(self.loader.dataset) * self.size  # type: ignore[arg-type]  # nearly: shares are almost alike
            note_corrupt(corrupt, self.corrupt, total)
            if batch is not None:
                yield batch


def note_corrupt(names: list[str], known: set[str], total: int) -> None:
    """Add names to the `known` corrupt ones of `total` images. Raises `ValueError` if there are too many."""
    for name in set(names) - known:
        known.add(name)
        log.warning("%s cannot be decoded and is left out (%d so far)", name, len(known))
    if len(known) > max(1, total / 1000):
        raise ValueError(
            f"{len(known)} of {total} images cannot be decoded: {first_few(known)}; at most one in a thousand may be "
            "left out; fetch them again"
        )
