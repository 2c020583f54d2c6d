"""Encoded images with labels: in class folders, or in the rows of a Hugging Face data set."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from facts.tasks.hub_data import HUB, fetched
from facts.utils.cache import content_key
from facts.utils.extras import needing

if TYPE_CHECKING:
    from datasets import Dataset

SAVED = ("dataset_dict.json", "state.json")  # written by `save_to_disk`
SHARDS = ("*.parquet", "data/*.parquet")
LABELS = ("label", "labels")


@dataclass(frozen=True, eq=False)
class ImageFiles(ABC):
    """Encoded images with names and `labels` [N], which can be pickled and read from several processes."""

    names: list[str]
    labels: np.ndarray

    @abstractmethod
    def read(self, index: int) -> bytes:
        """Read one encoded image; a missing one gives empty bytes, which fail to decode."""

    @property
    @abstractmethod
    def content_key(self) -> str:
        """Hash that identifies the images."""

    def __len__(self) -> int:
        return len(self.names)

    def selected(self, indices: Sequence[int]) -> Self:
        """The images at `indices`, in that order."""
        return replace(self, names=[self.names[index] for index in indices], labels=self.labels[indices])


@dataclass(frozen=True, eq=False)
class Files(ImageFiles):
    """Files below `folder`, identified only by their names."""

    folder: Path

    def read(self, index: int) -> bytes:
        return (self.folder / self.names[index]).read_bytes()

    @property
    def content_key(self) -> str:
        return hashlib.sha256("\n".join(self.names).encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Rows(ImageFiles):
    """Encoded images in the only column of a data set, at the rows `places` [N]."""

    rows: "Dataset"
    places: np.ndarray

    @classmethod
    def of(cls, data: "Dataset", split: str, image: str, label: str | None) -> Self:
        """Take images from the column `image` and labels from the column `label`, or zeros without one."""
        from datasets import Image

        return cls(
            names=[f"{split}/{row}" for row in range(len(data))],
            labels=np.array(data.with_format(None)[label] if label else [0] * len(data), dtype=np.int64),
            rows=data.with_format(None).select_columns(image).cast_column(image, Image(decode=False)),
            places=np.arange(len(data)),
        )

    def read(self, index: int) -> bytes:
        (image,) = self.rows[int(self.places[index])].values()
        if image is None:
            return b""
        return image["bytes"] or Path(image["path"]).read_bytes()

    def paths(self) -> list[str | None]:
        """Path of each image, if stored; read from the whole table, so no rows may have been selected before."""
        from pyarrow.compute import struct_field

        (column,) = self.rows.column_names
        paths = struct_field(self.rows.data[column], "path").to_pylist()
        return [paths[place] for place in self.places]

    @property
    def content_key(self) -> str:
        return content_key(self.rows._fingerprint, self.places.tolist(), self.labels.tolist())

    def selected(self, indices: Sequence[int]) -> Self:
        return replace(super().selected(indices), places=self.places[indices])


def is_dataset(source: str) -> bool:
    """Check whether `source` is a name on the hub, a folder of Parquet files, or one written by `save_to_disk`."""
    folder = Path(source).expanduser()
    return source.startswith(HUB) or any(any(folder.glob(pattern)) for pattern in (*SAVED, *SHARDS))


def splits_of(source: str) -> "dict[str, Dataset]":
    """Open the splits of a data set by name; an unnamed one is `train`.

    Raises `ValueError` for a malformed name, `OSError` if the data set cannot be read.
    """
    split = None
    if source.startswith(HUB):
        parts = source.removeprefix(HUB).split("/")
        if not 2 <= len(parts) <= 4:
            raise ValueError(f"images at the hub are hub:OWNER/DATASET/CONFIGURATION/SPLIT, got {source!r}")
        configuration, split = (*parts[2:], None, None)[:2]
        data = fetched(source, configuration, split, "a folder of images")
    else:
        with needing("llm", f"the data set {source}"):
            from datasets import load_dataset, load_from_disk
        folder = Path(source).expanduser()
        saved = any((folder / name).is_file() for name in SAVED)
        data = load_from_disk(folder) if saved else load_dataset(str(folder))
    return dict(data) if isinstance(data, dict) else {split or "train": data}


def columns_of(data: "Dataset", source: object) -> tuple[str, str | None]:
    """Find the image column and the class column, if any. Raises `ValueError` without exactly one of images."""
    from datasets import ClassLabel, Image

    images, labels = (
        [name for name, feature in data.features.items() if isinstance(feature, kind)] for kind in (Image, ClassLabel)
    )
    if len(images) != 1:
        found = f"{source} has {len(images)} columns of images among {', '.join(data.features)}"
        raise ValueError(f"{found}: give a data set with one (cast_column, remove_columns), and save_to_disk")
    named = [name for name in labels if name in LABELS] if len(labels) > 1 else labels
    if labels and len(named) != 1:
        raise ValueError(f"{source} has several columns of classes, none of them called label: keep one and save it")
    return images[0], named[0] if named else None


def first_few(names: Iterable[str]) -> str:
    """The first three in sorted order, with an ellipsis if there are more."""
    first, *more = sorted(names)
    return ", ".join([first, *more[:2]]) + (", ..." if more[2:] else "")
