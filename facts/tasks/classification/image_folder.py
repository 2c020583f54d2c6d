"""Image classification on your own images: in one folder per class, or in a Hugging Face data set."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import nn
from torchvision.datasets.folder import IMG_EXTENSIONS

from facts.tasks.classification.image_files import Files, ImageFiles, Rows, columns_of, first_few, is_dataset, splits_of
from facts.tasks.classification.imagenet import synsets
from facts.tasks.classification.images import Images
from facts.tasks.classification.preprocessing import labels_by_name, num_classes
from facts.utils.cache import content_key
from facts.utils.options import Count, options

if TYPE_CHECKING:
    from datasets import Dataset

TRAINING, EVALUATION = "train", ("val", "validation", "test")

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Pictures(Files):
    """Images identified by name, size and modification time; `labels` [N] are class indices."""

    @classmethod
    def within(cls, root: Path, part: Path, classes: Sequence[str]) -> Self:
        """Find images in the class folders of a part of `root`; without classes, in the part itself.

        Paths that are not regular files are skipped with a warning, since reading a pipe may never end.
        """
        pattern, positions = ("*/*", {name: label for label, name in enumerate(classes)}) if classes else ("*", {})
        found = [path for path in part.glob(pattern) if _is_image(path)]
        found = sorted(path for path in found if not classes or path.parent.name in positions)
        paths = [path for path in found if path.is_file()]
        if left_out := {*found} - {*paths}:
            text = "%d of %d images are left out, repair or remove these broken links, folders or pipes: %s"
            log.warning(text, len(left_out), len(found), first_few(map(str, left_out)))
        labels = np.array([positions.get(path.parent.name, 0) for path in paths], dtype=np.int64)
        return cls([str(path.relative_to(root)) for path in paths], labels, root)

    @property
    def content_key(self) -> str:
        states = [(self.folder / name).stat() for name in self.names]
        return content_key(self.names, [(s.st_size, s.st_mtime_ns) for s in states], self.labels.tolist())


@options
class ImageFolder(Images):
    """Images in `root/<class>/`; or in `root/train/<class>/` and, for evaluation, in `val`, `validation` or `test`.

    Unless both parts exist, half of the images are held out for evaluation, the same half for every `seed`; with
    `whole`, all images serve both purposes. A folder named like a part is a class if it has no
    subfolders but other folders next to it. Folders without images are ignored. A label is the index of the class in
    sorted order; or among ImageNet's synsets, if the network has 1,000 classes and all folders are named by synset; or
    the label of that name in a transformers model that has all the names. If the numbers of classes and folders differ,
    images have no labels and evaluation is not possible. `num_calibration` and `num_sensitivity` are upper bounds;
    searches compare outputs on images that are also used for the factors.
    """

    num_calibration: Count = 512
    whole: bool = False

    @property
    def training_images(self) -> ImageFiles:
        return self._splits[0]

    @property
    def validation_images(self) -> ImageFiles:
        return self._splits[1]

    @cached_property
    def classes(self) -> list[str]:
        """The names of the folders with images, sorted."""
        folders = (path for part in self._parts for path in _folders_in(part))
        return sorted({path.name for path in folders if any(map(_is_image, path.iterdir()))})

    def labels(self, model: nn.Module) -> np.ndarray | None:
        """The network's label `[C]` for each class; None if the folders are not the network's classes.

        An encoder has no classes: labels are positions.
        """
        total, by_name = num_classes(model), labels_by_name(model)
        if self.classes and total == len(synsets()) and set(self.classes) <= set(synsets()):
            return np.searchsorted(synsets(), self.classes)
        if self.classes and by_name.keys() >= set(self.classes):
            return np.array([by_name[name] for name in self.classes])
        return np.arange(len(self.classes)) if self.classes and total in (0, len(self.classes)) else None

    def labelled(self, images: ImageFiles, model: nn.Module) -> ImageFiles | None:
        labels = self.labels(model)
        return None if labels is None else replace(images, labels=labels[images.labels])

    def inspect(self) -> str:
        used = f"{len(self.training_images):,} images to calibrate on, {len(self.validation_images):,} to evaluate on"
        return f"{used}, {len(self.classes)} classes at {self.root}"

    def content_key(self, model: nn.Module) -> str:
        labels = self.labels(model)
        return content_key(super().content_key(model), self.classes, None if labels is None else labels.tolist())

    def chosen_indices(self) -> dict[str, list[int]]:
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(self.training_images), generator=generator).tolist()
        return {"sensitivity": order[: self.num_sensitivity], "calibration": order[: self.num_calibration]}

    @cached_property
    def _parts(self) -> list[Path]:
        """Find the folders for training and evaluation, or the only one. Raises `FileNotFoundError` without `root`."""
        if not self.root.is_dir():
            raise FileNotFoundError(f"no folder {self.root}: give one that holds a folder of images for each class")
        found = {path.name: path for path in _folders_in(self.root)}
        others = found.keys() - {TRAINING, *EVALUATION}
        parts = {name: path for name, path in found.items() if not others or _folders_in(path)}
        training, evaluation = ([parts[name] for name in names if name in parts] for names in ([TRAINING], EVALUATION))
        return [*training, *evaluation[:1]] or [self.root]

    @cached_property
    def _splits(self) -> list[ImageFiles]:
        """The images for calibration and for evaluation."""
        splits = self._found()
        if len(splits) > 1 or self.whole:
            return [splits[0], splits[-1]]
        order = torch.randperm(len(splits[0]), generator=torch.Generator().manual_seed(0))
        return [splits[0].selected(half.sort().values.tolist()) for half in order.tensor_split(2)]

    def _found(self) -> list[ImageFiles]:
        """Find the images of each part. Raises `ValueError` if a part has none."""
        splits: list[ImageFiles] = [Pictures.within(self.root, part, self.classes) for part in self._parts]
        if empty := [part for part, images in zip(self._parts, splits, strict=True) if not len(images)]:
            raise ValueError(f"{empty[0]} holds no images ({', '.join(IMG_EXTENSIONS)}), nor do folders in it")
        return splits


@options
class ImageDataset(ImageFolder):
    """Images of `hub:OWNER/DATASET`, optionally with `/CONFIGURATION` and `/SPLIT`, or of a local folder.

    The folder holds Parquet files, or was written by `save_to_disk`. The image and class columns are found by their
    types, `Image` and `ClassLabel`. The split `train` is for calibration, and `val`, `validation` or `test` for
    evaluation, if it has labels; a single split is divided as in `ImageFolder`. Classes get the labels of the network's
    classes of the same names, if it has all of them; otherwise their indices, if there are equally many.
    """

    @cached_property
    def classes(self) -> list[str]:
        """The names of the classes, in the order of their labels; empty if no column holds classes."""
        data = next(iter(self._data.values()))
        label = columns_of(data, self.root)[1]
        return list(data.features[label].names) if label else []

    @cached_property
    def _data(self) -> "dict[str, Dataset]":
        return splits_of(str(self.root))

    def _found(self) -> list[ImageFiles]:
        """Find the images for calibration and, if a split has labels, those for evaluation. Raises `ValueError`."""
        data = self._data
        columns = columns_of(next(iter(data.values())), self.root)
        names = [TRAINING, *EVALUATION] if len(data) > 1 else [*data]
        splits: list[ImageFiles] = [Rows.of(data[name], name, *columns) for name in names if name in data]
        if not splits or not len(splits[0]):
            raise ValueError(f"{self.root} has the splits {', '.join(data)}, and no images in {names[0]}: name a split")
        if (splits[0].labels < 0).any():
            raise ValueError(f"{self.root} has images without labels: remove these rows, or the column of classes")
        return [splits[0], *[split for split in splits[1:] if len(split) and (split.labels >= 0).all()][:1]]


def image_data(source: str, **options: Any) -> ImageFolder:
    """Open the images in a folder or data set. Raises `ValueError` or an `OSError` if there are none."""
    kind = ImageDataset if is_dataset(source) else ImageFolder
    images = kind(root=Path(source).expanduser(), **options)
    images.inspect()
    return images


def _folders_in(folder: Path) -> list[Path]:
    """Subfolders that are not hidden."""
    return [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMG_EXTENSIONS
