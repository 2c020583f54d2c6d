"""Images that are slices of one large file."""

import os
import weakref
from dataclasses import dataclass
from pathlib import Path

from facts.tasks.classification.imagenet_files.base import ImageFiles
from facts.utils.files import ScratchFolder


class LazyFile:
    """A file that the first read opens, in every process that it is pickled into."""

    def __init__(self, path: Path):
        self.path = path
        self._descriptor: int | None = None

    def __getstate__(self) -> dict:
        return {"path": self.path, "_descriptor": None}

    def read(self, offset: int, length: int) -> bytes:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
        # Needs no file position, which a forked process would share.
        return os.pread(self._descriptor, length, offset)


@dataclass(frozen=True, eq=False)
class Slices(ImageFiles):
    """`places` are offset and length in `file`, and a stamp; `owner` is its temporary folder, if it has one."""

    file: LazyFile
    owner: ScratchFolder | None = None

    def read(self, index: int) -> bytes:
        return self.file.read(*self.places[index, :2])

    def stamp(self, index: int) -> int:
        return int(self.places[index, 2])
