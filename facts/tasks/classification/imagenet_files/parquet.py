"""ImageNet as Hugging Face parquet shards: `root/data/train-*.parquet` and `root/data/validation-*.parquet`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import numpy as np

from facts.tasks.classification.imagenet_files.base import ImageFiles, Split, by_name, first_few, stamp_of, synsets
from facts.tasks.classification.imagenet_files.slices import LazyFile, Slices
from facts.utils.extras import needing
from facts.utils.files import ScratchFolder
from facts.utils.progress import with_progress

SHARDS = {"train": "data/train-*.parquet", "val": "data/validation-*.parquet"}
NEEDED = tuple(SHARDS.values())
COLUMNS = {"image.path", "image.bytes", "label"}


def arrow() -> ModuleType:
    """Import pyarrow. Raises `ModuleNotFoundError` that says what to install."""
    with needing("parquet", "a folder of parquet shards"):
        import pyarrow.parquet
    return pyarrow


@dataclass(frozen=True, eq=False)
class Shards(ImageFiles):
    """`places` are shard, row group and row within the group. The row group read last stays in memory."""

    paths: list[Path]
    _last: dict = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, root: Path, split: Split) -> "Shards":
        """List the images of a split.

        Raises `ValueError` for missing or damaged shards, for other columns, and for labels that differ from those of
        the file names; `ModuleNotFoundError` without pyarrow.
        """
        paths = sorted(root.glob(SHARDS[split]))
        check_whole(paths)
        names, places = [], []
        for number, path in enumerate(paths):
            shard_names, group_sizes = described(path)
            names += shard_names
            places += [(number, group, row) for group, size in enumerate(group_sizes) for row in range(size)]
        return cls(**by_name(names, places, root / SHARDS[split]), paths=paths)

    def read(self, index: int) -> bytes:
        shard, group, row = self.places[index].tolist()
        if (shard, group) not in self._last:
            self._last.clear()
            self._last[shard, group] = self._row_group(shard, group)
        return self._last[shard, group][row]["bytes"].as_py() or b""

    def stamp(self, index: int) -> int:
        return stamp_of(self.paths[self.places[index, 0]])

    def _row_group(self, shard: int, group: int) -> Any:
        with arrow().parquet.ParquetFile(self.paths[shard]) as file:
            return file.read_row_group(group, columns=["image.bytes"], use_threads=False)["image"]

    def gathered(self, indices: Sequence[int]) -> Slices:
        """The images at `indices`, copied into a temporary file; every row group is read once."""
        chosen, scratch = self.selected(indices), ScratchFolder()
        path, order = scratch.path / "images", np.lexsort(chosen.places.T[::-1])
        places = np.empty((len(chosen), 3), dtype=np.int64)
        with path.open("wb") as file:
            for index in with_progress(order.tolist(), "reading parquet shards"):
                image = chosen.read(index)
                places[index] = file.tell(), len(image), chosen.stamp(index)
                file.write(image)
        return Slices(chosen.names, chosen.labels, places, LazyFile(path), scratch)


def check_whole(paths: list[Path]) -> None:
    """Raises `ValueError` if shards are missing by names that end in `-00000-of-00294`."""
    numbered = [match for path in paths if (match := re.search(r"-(\d+)-of-(\d+)$", path.stem))]
    wanted = {f"-{number:05}-of-{match[2]}" for match in numbered for number in range(int(match[2]))}
    if missing := wanted - {match[0] for match in numbered}:
        raise ValueError(f"{paths[0].parent} lacks {len(missing)} shards: {first_few(missing)}; fetch them too")


def described(path: Path) -> tuple[list[str], list[int]]:
    """`<synset>/<file>` of each image in a shard, and the sizes of its row groups."""
    pyarrow = arrow()
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            missing = COLUMNS - {column.path for column in file.schema}
            table = None if missing else file.read(columns=["image.path", "label"], use_threads=False)
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}): fetch it again") from error
    if table is None:
        raise ValueError(
            f"{path} lacks the columns {first_few(missing)}: it must hold image, of bytes and path, and label"
        )
    images, labels = table["image"].to_pylist(), table["label"].to_pylist()
    return [synset_and_name(image["path"], label, path) for image, label in zip(images, labels, strict=True)], sizes


def synset_and_name(image: str | None, label: int, shard: Path) -> str:
    """`<synset>/<file>`, without the synset that these shards append to the file name."""
    if image is None or label not in range(len(synsets())):
        raise ValueError(f"{shard} holds the image {image} of label {label}: it needs a path, and a label of 0 to 999")
    path, synset = PurePosixPath(image), synsets()[label]
    if told := set(re.findall(r"n\d{8}", path.stem)) - {synset}:
        raise ValueError(
            f"{shard} gives {image} the label {label}, which is {synset} and not {first_few(told)}: labels must be "
            "positions among the sorted synsets"
        )
    return f"{synset}/{path.stem.removesuffix(f'_{synset}')}{path.suffix}"
