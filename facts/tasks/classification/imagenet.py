"""ImageNet-1k, in class folders or as a Hugging Face data set."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from timm.data import ImageNetInfo
from torchvision.datasets.folder import IMG_EXTENSIONS

from facts.tasks.base import chosen_indices_of
from facts.tasks.classification.image_files import Files, ImageFiles, Rows, columns_of, first_few, is_dataset, splits_of
from facts.tasks.classification.images import Images, Transform
from facts.utils.options import Count, options

Split = Literal["train", "val"]
UNPACK = "import torchvision; [torchvision.datasets.ImageNet({!r}, split) for split in ('train', 'val')]"


@options
class ImageNet(Images):
    """ImageNet-1k in `root`: class folders in `train/` and `val/`, into which torchvision unpacks the tar files.

    `root` can also be a Hugging Face data set: Parquet files, the output of `save_to_disk`, or
    `hub:ILSVRC/imagenet-1k`. A label is the index of the class among the sorted synsets. The training images, sorted by
    synset and file name, are shuffled by `seed`: the first `num_sensitivity` are for rank searches, the next
    `num_calibration` for the factors (paper, section 5.1).
    """

    num_calibration: Count = 16384
    transform: Transform = "paper"

    @property
    def classes(self) -> tuple[str, ...]:
        return synsets()

    @cached_property
    def training_images(self) -> ImageFiles:
        return find_images(self.root, "train")

    @cached_property
    def validation_images(self) -> ImageFiles:
        return find_images(self.root, "val")

    def inspect(self) -> str:
        self.chosen_indices()
        training, validation = len(self.training_images), len(self.validation_images)
        return f"{training:,} training and {validation:,} validation images of 1,000 classes at {self.root}"

    def chosen_indices(self) -> dict[str, list[int]]:
        """Indices of the training images for each use. Raises `ValueError` if there are too few."""
        return chosen_indices_of(self)


def find_images(root: Path, split: Split) -> ImageFiles:
    """Find the images of a split, sorted by `<synset>/<file>`.

    Raises `FileNotFoundError` if there is no ImageNet, and `ValueError` if its classes differ.
    """
    if is_dataset(str(root)):
        return _in_rows(root, split)
    if not all((root / name).is_dir() for name in ("train", "val")):
        raise FileNotFoundError(
            f"no ImageNet at {root}: set root to class folders in train/ and val/, or to Hugging Face's Parquet files. "
            f'Unpack the original tar files in place: python -c "{UNPACK.format(str(root))}"'
        )
    folder = root / split
    images = (path for path in folder.glob("[!.]*/*") if path.suffix.lower() in IMG_EXTENSIONS)
    names = sorted(f"{path.parent.name}/{path.name}" for path in images)
    return Files(names, _labels(names, folder), folder)


def _in_rows(root: Path, split: Split) -> Rows:
    splits = splits_of(str(root))
    name = {"train": "train", "val": "validation"}[split]
    if name not in splits:
        raise ValueError(f"{root} has the splits {', '.join(splits)}, and none called {name}")
    rows = Rows.of(splits[name], name, *columns_of(splits[name], root))
    names = [_name(path, label, row) for row, (path, label) in enumerate(zip(rows.paths(), rows.labels, strict=True))]
    order = sorted(range(len(names)), key=names.__getitem__)
    names = [names[index] for index in order]
    return replace(rows.selected(order), names=names, labels=_labels(names, root))


def _name(path: str | None, label: int, row: int) -> str:
    """Make `<synset>/<file>`, dropping the synset that the hub appends to file names."""
    synset = synsets()[label] if label in range(len(synsets())) else f"label {label}"
    if others := set(re.findall(r"n\d{8}", path or "")) - {synset}:
        message = f"{path} has the label {label}, which is {synset} and not {first_few(others)}"
        raise ValueError(f"{message}: labels must be positions among the sorted synsets")
    return f"{synset}/{re.sub(rf'_{synset}(?=[.])', '', Path(path).name) if path else row}"


def _labels(names: Sequence[str], source: object) -> np.ndarray:
    """Label of each `<synset>/<file>`. Raises `ValueError` if a class is missing or unknown."""
    labels = {synset: label for label, synset in enumerate(synsets())}
    found = [name.split("/")[0] for name in names]
    _refuse(set(found) - labels.keys(), f"{source} holds classes that are not in ImageNet-1k")
    _refuse(labels.keys() - set(found), f"{source} holds no image of classes of ImageNet-1k")
    return np.array([labels[synset] for synset in found])


def _refuse(classes: Iterable[str], fault: str) -> None:
    if classes := set(classes):
        raise ValueError(f"{fault}, {len(classes)} of them: {first_few(classes)}; classes are named by their synsets")


@cache
def synsets() -> tuple[str, ...]:
    """Synsets of ImageNet-1k, sorted: the label of a class is its index."""
    return tuple(sorted(ImageNetInfo("imagenet-1k").label_names()))
