"""Shared parts of the layouts of ImageNet: images in the order of their names, labels by synset."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from timm.data import ImageNetInfo

from facts.utils.cache import content_key

Split = Literal["train", "val"]


@dataclass(frozen=True, eq=False)
class ImageFiles(ABC):
    """Encoded images of ImageNet-1k, which can be pickled and read from several processes.

    `names` are `<synset>/<file>`, `labels` [N] the positions of the synsets among the 1,000 sorted ones, `places` [N,
    k] say where each image is stored, in the layout's own numbers.
    """

    names: list[str]
    labels: np.ndarray
    places: np.ndarray

    @abstractmethod
    def read(self, index: int) -> bytes:
        """Read one encoded image."""

    @abstractmethod
    def stamp(self, index: int) -> int:
        """A number that changes with the file that holds the image."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def content_key(self) -> str:
        """Hash of the names, the same in every layout."""
        return hashlib.sha256("\n".join(self.names).encode()).hexdigest()[:16]

    def selected(self, indices: Sequence[int]) -> Self:
        """The images at `indices`, in that order."""
        names = [self.names[index] for index in indices]
        return replace(self, names=names, labels=self.labels[indices], places=self.places[indices])

    def gathered(self, indices: Sequence[int]) -> "ImageFiles":
        """Like `selected`, but quick to read in that order."""
        return self.selected(indices)

    def as_stored(self) -> Self:
        """All images, in the order that is quickest to read."""
        return self.selected(np.lexsort(self.places.T[::-1]))


def stamp_of(path: Path) -> int:
    """A number of 60 bits that changes with a file's size and time of change."""
    status = path.stat()
    return int(content_key(status.st_size, status.st_mtime_ns)[:15], 16)


def by_name(names: Sequence[str], places: ArrayLike, source: object) -> dict[str, Any]:
    """Make the fields of `ImageFiles`, in the order of the names, from images in any order.

    Raises `ValueError` if a class is missing or unknown.
    """
    order = sorted(range(len(names)), key=names.__getitem__)
    names = [names[index] for index in order]
    found = [name.split("/")[0] for name in names]
    labels = {synset: label for label, synset in enumerate(synsets())}
    if unknown := set(found) - labels.keys():
        raise ValueError(
            f"{source} holds {len(unknown)} classes that are none of ImageNet-1k: {first_few(unknown)}; classes are "
            "called by their synsets, such as n01440764; take the others away"
        )
    if missing := labels.keys() - set(found):
        raise ValueError(
            f"{source} holds no image of {len(missing)} of the 1000 classes: {first_few(missing)}; add them, with each "
            "class under its synset"
        )
    rows = np.array(places, dtype=np.int64).reshape(len(names), -1)[order]
    return {"names": names, "labels": np.array([labels[synset] for synset in found]), "places": rows}


@cache
def synsets() -> tuple[str, ...]:
    """Synsets of ImageNet-1k, sorted: the label of a class is its position."""
    return tuple(sorted(ImageNetInfo("imagenet-1k").label_names()))


def first_few(names: Iterable[str]) -> str:
    """The first three in sorted order, and whether there are more."""
    first, *more = sorted(names)
    return ", ".join([first, *more[:2]]) + (", ..." if more[2:] else "")
