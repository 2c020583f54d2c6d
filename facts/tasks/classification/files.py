"""Encoded images and their labels: in class folders, listed in a CSV file, or in rows of a Hugging Face data set."""

import csv
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from timm.data import ImageNetInfo
from torchvision.datasets.folder import IMG_EXTENSIONS

from facts.utils.cache import content_key
from facts.utils.files import at_home
from facts.utils.hub import HUB, fetched
from facts.utils.options import needing

if TYPE_CHECKING:
    from datasets import Dataset

TRAINING = ("calibration", "train", "training")  # names of parts; the first that is there is taken
EVALUATION = ("val", "valid", "validation", "dev", "eval", "evaluation", "test", "testing")
ENDINGS = (*IMG_EXTENSIONS, ".avif", ".gif", ".jfif", ".jpe")
TABLE = "labels.csv"
LARGEST_LABEL = 1_000_000  # each class up to it gets a name
SAVED = ("dataset_dict.json", "state.json")  # written by `save_to_disk`
SHARDS = ("*.parquet", "data/*.parquet")
UNPACK = "import torchvision; [torchvision.datasets.ImageNet({!r}, split) for split in ('train', 'val')]"

log = logging.getLogger(__name__)


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
        """Hash that identifies the images and their labels."""

    def __len__(self) -> int:
        return len(self.names)

    def selected(self, indices: Sequence[int]) -> Self:
        """The images at `indices`, in that order."""
        return replace(self, names=[self.names[index] for index in indices], labels=self.labels[indices])


@dataclass(frozen=True, eq=False)
class Files(ImageFiles):
    """Files below `folder`, identified by name and, if they `may_change`, by size and modification time."""

    folder: Path
    may_change: bool = True

    def read(self, index: int) -> bytes:
        return (self.folder / self.names[index]).read_bytes()

    @property
    def content_key(self) -> str:
        states = [(self.folder / name).stat() for name in self.names] if self.may_change else []
        key = "\n".join(self.names), self.labels.tobytes(), [(s.st_size, s.st_mtime_ns) for s in states]
        return content_key(*key)


@dataclass(frozen=True, eq=False)
class Rows(ImageFiles):
    """Encoded images in the only column of a data set, at the rows `places` [N]."""

    rows: "Dataset"
    places: np.ndarray

    @classmethod
    def of(cls, data: "Dataset", split: str, source: object) -> Self:
        """Take images and labels from the columns of these types; labels are zeros without a column of classes."""
        from datasets import Image

        image, label = columns_of(data, source)
        known = data.with_format(None)[label] if label else [0] * len(data)
        return cls(
            names=[f"{split}/{row}" for row in range(len(data))],
            labels=np.array([-1 if each is None else each for each in known], dtype=np.int64),
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


@dataclass(frozen=True)
class Found:
    """The images of each part of a folder or data set, by its name. A label is a position in `classes`.

    If they are `numbered`, positions are the network's own labels. Names that are `left_out` are grouped by the reason.
    """

    parts: Mapping[str, ImageFiles]
    classes: list[str]
    numbered: bool = False
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)


def find_images(source: Path) -> Found:
    """Find the images to calibrate on and, if there is another part with labels, those of the first to evaluate on.

    A warning counts all others. Raises `ValueError` or an `OSError` if there are none.
    """
    found = _found(source)
    parts, named = found.parts, [*found.parts]
    if len(named) > 1:
        named = [name for name in (*TRAINING, *EVALUATION) if name in parts]
    if not named or not len(parts[named[0]]):
        raise ValueError(f"{source} has the splits {', '.join(parts)}, and no images in train: name a split")
    others = {name: parts[name] for name in EVALUATION if name in parts and name != named[0]}
    judging = [name for name, files in others.items() if len(files) and (files.labels >= 0).all()][:1]
    kept = {name: parts[name] for name in (named[0], *judging)}
    unused = {f"in {name}": files.names for name, files in parts.items() if name not in kept}
    if left_out := {kind: names for kind, names in {**found.left_out, **unused}.items() if names}:
        total = sum(map(len, left_out.values()))
        log.warning("%s files and folders at %s are left out: %s", f"{total:,}", source, summed_up(left_out))
    return replace(found, parts=kept)


def _found(source: Path) -> Found:
    if is_dataset(source):
        data = splits_of(source)
        label = columns_of(first := next(iter(data.values())), source)[1]
        classes = list(first.features[label].names) if label else []
        return Found({name.lower(): Rows.of(split, name, source) for name, split in data.items()}, classes)
    if not source.is_dir():
        raise FileNotFoundError(f"no folder {source}: give one that holds a folder of images for each class")
    return _listed(source) if (source / TABLE).is_file() else _in_folders(source)


def _in_folders(root: Path) -> Found:
    """Find images in class folders and below them; without any, in the parts of `root` or in `root` itself.

    Only regular files are read, since reading a pipe may never end.
    """
    places = [path.relative_to(root) for path in sorted(_below(root)) if path != root]
    tops = {place.parts[0].lower(): place.parts[0] for place in places if len(place.parts) > 1}  # `Train` is `train`
    deep = {place.parts[0].lower() for place in places if len(place.parts) > 2}
    named = deep if tops.keys() - {*TRAINING, *EVALUATION} else tops.keys()
    chosen = [next((tops[name] for name in names if name in named), None) for names in (TRAINING, EVALUATION)]
    folders = [name for name in chosen if name] or [""]
    depth = 1 if folders == [""] else 2  # of an image in no class folder
    images = [place for place in places if _is_image(place) and {"", place.parts[0]} & {*folders}]
    classes = sorted({place.parts[depth - 1] for place in images if len(place.parts) > depth})
    images = [place for place in images if len(place.parts) > depth or (len(place.parts) == depth and not classes)]
    positions, parts = {name: label for label, name in enumerate(classes)}, dict[str, ImageFiles]()
    for name in folders:
        found = [place for place in images if name in ("", place.parts[0]) and (root / place).is_file()]
        labels = np.array([positions.get(place.parts[depth - 1], 0) for place in found], dtype=np.int64)
        parts[(name or root.name).lower()] = Files([*map(str, found)], labels, root)
    used = {name for files in parts.values() for name in files.names}
    left_out = _by_kind(root, (place for place in places if str(place) not in used), folders)
    if empty := [folder for folder, files in zip(folders, parts.values(), strict=True) if not len(files)]:
        formats = ", ".join(ENDINGS)
        others = f"; left out: {summed_up(left_out)}" if left_out else ""
        message = f"{root / empty[0]} holds no images ({formats}), nor do folders in it, or in `train` and `val`"
        raise ValueError(message + others)
    return Found(parts, classes, left_out=left_out)


def _below(folder: Path, around: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield all files below a folder, and folders without any that can be read; hidden ones are skipped.

    Links are followed, except to a folder `around` them.
    """
    real, entries = os.path.realpath(folder), list[os.DirEntry]()
    if real not in around:
        with suppress(PermissionError) if around else nullcontext():
            entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    if not entries:
        yield folder
    for entry in entries:
        if os.path.isdir(entry.path):  # also of links in a circle
            yield from _below(Path(entry.path), around | {real})
        else:
            yield Path(entry.path)


def _by_kind(root: Path, places: Iterable[Path], folders: Sequence[str]) -> dict[str, list[str]]:
    """Group what is left out of `folders` of `root` by where or what it is."""
    kinds: dict[str, list[str]] = {}
    for place in places:
        if len(place.parts) > 1 and not {"", place.parts[0]} & {*folders}:
            kind = f"in {place.parts[0]}/"
        elif (root / place).is_dir():
            kind = "empty or unreadable folders"
        elif not (root / place).is_file():
            kind = "broken links or pipes"
        elif _is_image(place):
            kind = "beside the class folders"
        else:
            kind = f"named *{place.suffix}" if place.suffix else "without an ending"
        kinds.setdefault(kind, []).append(str(place))
    return kinds


def summed_up(left_out: Mapping[str, Sequence[str]]) -> str:
    """Count names by kind, and give the first few."""
    return "; ".join(f"{len(names):,} {kind} ({first_few(names)})" for kind, names in left_out.items())


def _listed(root: Path) -> Found:
    """Read `labels.csv`: a `file` in `root` and its `label` in each row, in this order.

    Files below folders that are named like parts make these parts. Raises `ValueError` for rows without a label, and
    `FileNotFoundError` for files that are not there.
    """
    try:
        with (root / TABLE).open(newline="", encoding="utf-8-sig") as file:
            rows = [*csv.DictReader(file, skipinitialspace=True)]
        names = [os.fspath(row["file"]) for row in rows]  # None in a short row
        labels = np.array([int(row["label"]) for row in rows], dtype=np.int64)
    except (csv.Error, KeyError, OverflowError, TypeError, ValueError) as error:
        needed = f"{root / TABLE} needs columns `file` and `label`, of whole numbers, with commas between, in UTF-8"
        raise ValueError(f"{needed}: {type(error).__name__}, {error}") from error
    if missing := [name for name in names if not (root / name).is_file()]:
        raise FileNotFoundError(f"{root / TABLE} names {len(missing)} files that are not there: {first_few(missing)}")
    if not names or labels.min() < 0 or labels.max() > LARGEST_LABEL:
        raise ValueError(f"{root / TABLE} needs rows with labels from 0 on, at most {LARGEST_LABEL:,}")
    files, places = Files(names, labels, root), dict[str, list[int]]()
    for place, name in enumerate(names):
        places.setdefault(name.partition("/")[0].lower(), []).append(place)
    parts = {name: files.selected(places[name]) for name in (*TRAINING, *EVALUATION) if name in places}
    used = {TABLE, *(os.path.normpath(name) for part in parts.values() or [files] for name in part.names)}
    others = [name for path in sorted(_below(root)) if (name := str(path.relative_to(root))) not in used]
    classes = [str(label) for label in range(labels.max() + 1)]
    return Found(parts or {root.name: files}, classes, True, {f"not in {TABLE}": others})


def is_dataset(source: Path | str) -> bool:
    """Check whether `source` is a name on the hub, a folder of Parquet files, or one written by `save_to_disk`."""
    folder = at_home(source)
    return str(source).startswith(HUB) or any(any(folder.glob(pattern)) for pattern in (*SAVED, *SHARDS))


def splits_of(source: Path) -> "dict[str, Dataset]":
    """Open the splits of a data set by name; an unnamed one is `train`.

    Raises `ValueError` for a malformed name, `OSError` if the data set cannot be read.
    """
    name, split = str(source), None
    if name.startswith(HUB):
        parts = name.removeprefix(HUB).split("/")
        if not 2 <= len(parts) <= 4:
            raise ValueError(f"images at the hub are {HUB}OWNER/DATASET/CONFIGURATION/SPLIT, got {name!r}")
        configuration, split = (*parts[2:], None, None)[:2]
        data = fetched(name, configuration, split, "a folder of images")
    else:
        with needing("llm", f"the data set {source}"):
            from datasets import load_dataset, load_from_disk
        folder = at_home(source)
        saved = any((folder / file).is_file() for file in SAVED)
        try:
            data = load_from_disk(folder) if saved else load_dataset(str(folder))
        except Exception as error:  # of several libraries
            raise ValueError(f"the data set {folder} has no rows, or is damaged ({error})") from error
    return dict(data) if isinstance(data, dict) else {split or TRAINING[0]: data}


def columns_of(data: "Dataset", source: object) -> tuple[str, str | None]:
    """Find the image column and the class column, if any. Raises `ValueError` without exactly one of images."""
    from datasets import ClassLabel, Image

    images, labels = (
        [name for name, feature in data.features.items() if isinstance(feature, kind)] for kind in (Image, ClassLabel)
    )
    if len(images) != 1:
        found = f"{source} has {len(images)} columns of images among {', '.join(data.features)}"
        raise ValueError(f"{found}: give a data set with one (cast_column, remove_columns), and save_to_disk")
    named = [name for name in labels if name in ("label", "labels")] if len(labels) > 1 else labels
    if labels and len(named) != 1:
        raise ValueError(f"{source} has several columns of classes, none of them called label: keep one and save it")
    return images[0], named[0] if named else None


def find_imagenet(root: Path, split: Literal["train", "val"]) -> ImageFiles:
    """Find the images of a split of ImageNet-1k, sorted by `<synset>/<file>`; a label is a synset's position.

    Raises `FileNotFoundError` if there is no ImageNet, and `ValueError` if its classes differ.
    """
    if is_dataset(root):
        return _rows_of_imagenet(root, {"train": "train", "val": "validation"}[split])
    if not all((root / name).is_dir() for name in ("train", "val")):
        raise FileNotFoundError(
            f"no ImageNet at {root}: it must hold class folders in train/ and val/, or Hugging Face's Parquet files "
            "(imagenet=FOLDER). "
            f'Unpack the original tar files in place: python -c "{UNPACK.format(str(root))}"'
        )
    folder = root / split
    found = [f"{path.parent.name}/{path.name}" for path in folder.glob("[!.]*/[!.]*")]
    names = sorted(name for name in found if _is_image(Path(name)))
    if len(names) < len(found):
        log.warning("%s of %s files in %s are no images and left out", len(found) - len(names), len(found), folder)
    return Files(names, _labels_of_imagenet(names, folder), folder, may_change=False)  # a million files


def _rows_of_imagenet(root: Path, split: str) -> Rows:
    splits = splits_of(root)
    if split not in splits:
        raise ValueError(f"{root} has the splits {', '.join(splits)}, and none called {split}")
    rows = Rows.of(splits[split], split, root)
    names = [_name(path, label, row) for row, (path, label) in enumerate(zip(rows.paths(), rows.labels, strict=True))]
    order = sorted(range(len(names)), key=names.__getitem__)
    names = [names[index] for index in order]
    return replace(rows.selected(order), names=names, labels=_labels_of_imagenet(names, root))


def _name(path: str | None, label: int, row: int) -> str:
    """Make `<synset>/<file>`, dropping the synset that the hub appends to file names."""
    synset = synsets()[label] if label in range(len(synsets())) else f"label {label}"
    if others := set(re.findall(r"n\d{8}", path or "")) - {synset}:
        message = f"{path} has the label {label}, which is {synset} and not {first_few(others)}"
        raise ValueError(f"{message}: labels must be positions among the sorted synsets")
    return f"{synset}/{re.sub(rf'_{synset}(?=[.])', '', Path(path).name) if path else row}"


def _labels_of_imagenet(names: Sequence[str], source: object) -> np.ndarray:
    """Label of each `<synset>/<file>`. Raises `ValueError` if a class is missing or unknown."""
    labels = {synset: label for label, synset in enumerate(synsets())}
    found = [name.split("/")[0] for name in names]
    for classes, fault in (
        ({*found} - labels.keys(), "classes that are not in ImageNet-1k"),
        (labels.keys() - {*found}, "no image of classes of ImageNet-1k"),
    ):
        if classes:
            message = f"{source} holds {fault}, {len(classes)} of them: {first_few(classes)}"
            raise ValueError(f"{message}; classes are named by their synsets")
    return np.array([labels[synset] for synset in found])


@cache
def synsets() -> tuple[str, ...]:
    """Synsets of ImageNet-1k, sorted: the label of a class is its index."""
    return tuple(sorted(ImageNetInfo("imagenet-1k").label_names()))


def first_few(names: Iterable[str]) -> str:
    """The first three in sorted order, with an ellipsis if there are more."""
    first, *more = sorted(names)
    return ", ".join([first, *more[:2]]) + (", ..." if more[2:] else "")


def _is_image(path: Path) -> bool:
    """Whether the name is that of an image, and not hidden, as what macOS puts next to each."""
    return path.suffix.lower() in ENDINGS and not path.name.startswith(".")
