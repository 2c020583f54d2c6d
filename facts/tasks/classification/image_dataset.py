"""Image classification on a data set of Hugging Face's `datasets`: at the hub, or saved on this machine."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from facts.tasks.classification.image_folder import EVALUATION, TRAINING, ImageFolder
from facts.tasks.classification.imagenet_files import ImageFiles
from facts.tasks.hub_data import HUB, fetched
from facts.utils.cache import content_key
from facts.utils.extras import needing
from facts.utils.options import options

if TYPE_CHECKING:
    from datasets import Dataset

SAVED = ("dataset_dict.json", "state.json")  # written by `save_to_disk`
LABELS = ("label", "labels")


def is_dataset(source: str) -> bool:
    """Check for a name at the hub, or a folder that `save_to_disk` wrote."""
    return source.startswith(HUB) or any((Path(source).expanduser() / name).is_file() for name in SAVED)


@dataclass(frozen=True, eq=False)
class Rows(ImageFiles):
    """Images in the only column of a data set, as they are stored; `places` are rows."""

    rows: "Dataset"

    @classmethod
    def of(cls, data: "Dataset", split: str, image: str, label: str | None) -> Self:
        from datasets import Image

        return cls(
            names=[f"{split}/{row}" for row in range(len(data))],
            labels=np.array(data.with_format(None)[label] if label else [0] * len(data), dtype=np.int64),
            places=np.arange(len(data)).reshape(-1, 1),
            rows=data.with_format(None).select_columns(image).cast_column(image, Image(decode=False)),
        )

    def read(self, index: int) -> bytes:
        (image,) = self.rows[int(self.places[index, 0])].values()
        if image is None:
            return b""  # which cannot be decoded, and is left out
        return image["bytes"] or Path(image["path"]).read_bytes()

    def stamp(self, index: int) -> int:
        return int(content_key(self.rows._fingerprint, self.names[index])[:15], 16)

    @property
    def content_key(self) -> str:
        return content_key(self.rows._fingerprint, self.places.tolist(), self.labels.tolist())


@options
class ImageDataset(ImageFolder):
    """Images of `hub:OWNER/DATASET`, with `/CONFIGURATION` and `/SPLIT` if wanted, or of a folder by `save_to_disk`.

    The column of images and that of classes are found by their types, `Image` and `ClassLabel`. The split `train` is
    for calibration, and `val`, `validation` or `test` for evaluation, if it has labels; a split alone is divided as in
    `ImageFolder`. Classes have the labels of the network's classes of the same names, if it has all of these; else
    their positions, if there are as many.
    """

    @cached_property
    def classes(self) -> list[str]:
        """The names of the classes, in the order of their labels; empty if no column holds classes."""
        label = self._columns[1]
        return list(next(iter(self._data.values())).features[label].names) if label else []

    @cached_property
    def _data(self) -> "dict[str, Dataset]":
        """The splits by name. Raises `ValueError` for a name of another form, `OSError` if it cannot be read."""
        source = str(self.root)
        if source.startswith(HUB):
            parts = source.removeprefix(HUB).split("/")
            if not 2 <= len(parts) <= 4:
                raise ValueError(f"images at the hub are hub:OWNER/DATASET/CONFIGURATION/SPLIT, got {source!r}")
            configuration, split = (*parts[2:], None, None)[:2]
            data = fetched(source, configuration, split, "a folder of images")
        else:
            with needing("llm", f"the data set {source}"):
                from datasets import load_from_disk
            data, split = load_from_disk(source), None
        return dict(data) if isinstance(data, dict) else {split or TRAINING: data}

    @cached_property
    def _columns(self) -> tuple[str, str | None]:
        """The columns of images and of classes, if any. Raises `ValueError` if there is not one of images."""
        from datasets import ClassLabel, Image

        features = next(iter(self._data.values())).features
        images, labels = (
            [name for name, feature in features.items() if isinstance(feature, kind)] for kind in (Image, ClassLabel)
        )
        if len(images) != 1:
            raise ValueError(
                f"{self.root} has {len(images)} columns of images among {', '.join(features)}: give a data set with "
                "one, by cast_column(name, datasets.Image()) or remove_columns, and save_to_disk"
            )
        if len(labels) > 1:
            labels = [name for name in labels if name in LABELS]
        if len(labels) != 1 and any(isinstance(feature, ClassLabel) for feature in features.values()):
            raise ValueError(
                f"{self.root} has several columns of classes, none of them called label: leave one, by remove_columns "
                "and save_to_disk"
            )
        return images[0], labels[0] if labels else None

    def _found(self) -> list[ImageFiles]:
        """Find the images for calibration and, if a split has labels, those for evaluation. Raises `ValueError`."""
        data = self._data
        names = [TRAINING, *EVALUATION] if len(data) > 1 else [*data]
        splits: list[ImageFiles] = [Rows.of(data[name], name, *self._columns) for name in names if name in data]
        if not splits or not len(splits[0]):
            raise ValueError(f"{self.root} has the splits {', '.join(data)}, and no images in {names[0]}: name a split")
        if (splits[0].labels < 0).any():
            raise ValueError(f"{self.root} has images without labels: remove these rows, or the column of classes")
        return [splits[0], *[split for split in splits[1:] if len(split) and (split.labels >= 0).all()][:1]]


def image_data(source: str, **options: Any) -> ImageFolder:
    """Images by the name of a folder, or of a data set. Raises `ValueError` or an `OSError` if there are none."""
    kind = ImageDataset if is_dataset(source) else ImageFolder
    images = kind(root=Path(source).expanduser(), **options)
    images.inspect()
    return images
