"""Batches of decoded images, skipping those that cannot be decoded."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import timm.data
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from facts.tasks.classification.base import Batch
from facts.tasks.classification.image_files import ImageFiles, first_few
from facts.utils.random import seeded

LONGEST = 100  # times the shorter side; resizing a longer strip by its shorter side would take gigabytes
log = logging.getLogger(__name__)


def decode(data: bytes) -> Image.Image:
    """Decode an image to RGB; 16-bit greyscale keeps its shades.

    Raises `ValueError` for a broken file, too many pixels for Pillow, a strip more than 100 times as long as it is
    wide, and pixels of unknown range (floating point or 32 bits).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image: Image.Image = Image.open(BytesIO(data))
        if max(image.size) > LONGEST * min(image.size):
            raise ValueError(f"{image.width} x {image.height} pixels are a strip")
        if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):  # these have 16 bits
            raise ValueError("the range of its pixels is not known")
        if image.mode.startswith("I"):  # Pillow's own conversion turns all but the darkest pixels white
            image = image.convert("I").point(lambda value: value / 257).convert("L")
        return image.convert("RGB")
    except Exception as error:  # Pillow's errors differ by format
        raise ValueError(f"no usable image: {error}") from error


@dataclass(frozen=True)
class DecodedBatches(Dataset):
    """Batches of transformed images and their labels, each with the names of images that could not be decoded.

    Random transforms and `mixup` depend on `seed` and the batch number. With `for_training`, a smaller last batch is
    dropped, and a batch in which no image can be decoded raises `ValueError`, since steps are counted in batches.
    """

    files: ImageFiles
    transform: Callable[[Image.Image], Tensor]
    batch_size: int
    seed: tuple[int, ...]
    mixup: timm.data.Mixup | None = None
    for_training: bool = False

    def __len__(self) -> int:
        total = len(self.files)
        return total // self.batch_size if self.for_training else -(-total // self.batch_size)

    def __getitem__(self, number: int) -> tuple[Batch | None, list[str]]:
        indices = range(len(self.files))[number * self.batch_size :][: self.batch_size]
        samples, corrupt = [], []
        with seeded(*self.seed, number):
            for index in indices:
                data = self.files.read(index)
                try:
                    image = decode(data)
                except ValueError:
                    corrupt.append(self.files.names[index])
                else:
                    samples.append((self.transform(image), int(self.files.labels[index])))
            if not samples and self.for_training:
                message = f"no image of a training batch can be decoded: {first_few(corrupt)}"
                raise ValueError(f"{message}; fetch them again, or raise batch_size")
            return self._mixed(default_collate(samples)) if samples else None, corrupt

    def _mixed(self, batch: Any) -> Batch:
        """Mix the images in pairs, if there is a `mixup`; an image without a partner is dropped."""
        images, labels = batch
        even = len(images) // 2 * 2
        return self.mixup(images[:even], labels[:even]) if self.mixup else (images, labels)


@dataclass(frozen=True)
class Decodable:
    """Pass on the batches of `DecodedBatches` over `total` images, without labels unless `with_labels`.

    Each image that cannot be decoded is logged once. Raises `ValueError` if there are several of them and they
    exceed a thousandth of all images; each process counts its own.
    """

    total: int
    with_labels: bool = True
    corrupt: set[str] = field(default_factory=set)

    def __call__(self, item: tuple[Batch | None, list[str]]) -> Batch | Tensor | None:
        batch, corrupt = item
        for name in set(corrupt) - self.corrupt:
            self.corrupt.add(name)
            log.warning("%s cannot be decoded and is left out (%d so far)", name, len(self.corrupt))
        if len(self.corrupt) > max(1, self.total / 1000):
            message = f"{len(self.corrupt)} of {self.total} images cannot be decoded: {first_few(self.corrupt)}"
            raise ValueError(f"{message}; at most one in a thousand may be left out; fetch them again")
        return batch if self.with_labels or batch is None else batch[0]
