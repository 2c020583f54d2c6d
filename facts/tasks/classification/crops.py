"""Store of decoded images: what the transform of an evaluation crops, kept as bytes in one file."""

import math
import os
import weakref
import zlib
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor
from torchvision.transforms import Compose

from facts.tasks.classification import pictures
from facts.utils.cache import content_key
from facts.utils.files import needing_room, writable_folder
from facts.utils.sources import statements

HEAD = np.dtype([("stamp", "<u8"), ("checksum", "<u4")])
TO_TENSOR = ("ToTensor", "MaybeToTensor", "PILToTensor", "MaybePILToTensor")

Transform = Callable[[Image.Image], Tensor]


class Crops:
    """Images by name as a transform crops them, in `folder`, at `size`, height and width, in RGB.

    Each image has its place in a sparse file, which processes share; whoever needs it first writes it. Its checksum and
    the stamp of the encoded image stand before it: a crop that is damaged, half written or of a changed image is not
    read.
    """

    def __init__(self, folder: Path, names: Iterable[str], transform: Transform, size: tuple[int, int]):
        self.places = {name: place for place, name in enumerate(sorted(names))}
        self.geometry, self.to_tensor = divided(transform)
        self.shape = (*size, 3)
        self.length = HEAD.itemsize + math.prod(self.shape)
        key = content_key(list(self.places), repr(self.geometry), size, decoders())
        self.path = writable_folder(folder) / f"{key}.crops"
        self._descriptor: int | None = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_descriptor": None}

    def read(self, name: str, stamp: int) -> Image.Image | None:
        """The crop of an image whose encoded form has this stamp; None if it is not there."""
        data = os.pread(self._file(), self.length, self.places[name] * self.length)
        if len(data) < self.length:
            return None
        head, pixels = np.frombuffer(data, HEAD, count=1)[0], data[HEAD.itemsize :]
        if head["stamp"] != stamp or head["checksum"] != zlib.crc32(pixels):
            return None
        return Image.fromarray(np.frombuffer(pixels, np.uint8).reshape(self.shape))

    def write(self, name: str, stamp: int, crop: Image.Image) -> None:
        values = np.asarray(crop)
        if values.shape != self.shape:  # of a transform that crops otherwise than the network asks
            return
        pixels = values.tobytes()
        head = np.array([(stamp, zlib.crc32(pixels))], HEAD).tobytes()
        with needing_room(self.path):
            os.pwrite(self._file(), head + pixels, self.places[name] * self.length)

    def _file(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            weakref.finalize(self, os.close, self._descriptor)
        return self._descriptor


def decoders() -> list[str]:
    """Code and libraries that decode; beside the transform, pixels depend on nothing else."""
    return [*map(statements, (Path(pictures.__file__), Path(__file__))), *map(version, ("pillow", "torchvision"))]


def divided(transform: Transform) -> tuple[Callable[[Image.Image], Image.Image], Transform]:
    """The part of a transform that gives an image, and the rest, from the step that makes it a tensor on."""
    assert isinstance(transform, Compose)
    steps = transform.transforms
    first = next(place for place, step in enumerate(steps) if type(step).__name__ in TO_TENSOR)
    return Compose(steps[:first]), Compose(steps[first:])
