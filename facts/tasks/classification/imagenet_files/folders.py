"""ImageNet as folders of images: `root/train/<synset>/*` and `root/val/<synset>/*`."""

from dataclasses import dataclass
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from facts.tasks.classification.imagenet_files.base import ImageFiles, Split, by_name, stamp_of

NEEDED = ("train/", "val/")


@dataclass(frozen=True, eq=False)
class Folders(ImageFiles):
    """A folder with one folder a class."""

    folder: Path

    @classmethod
    def of(cls, root: Path, split: Split) -> "Folders":
        """List the images of a split. Raises `ValueError` for a class folder that is missing, empty or unknown."""
        folder = root / split
        names = [
            f"{path.name}/{image.name}"
            for path in folder.iterdir()
            if path.is_dir() and not path.name.startswith(".")
            for image in path.iterdir()
            if image.suffix.lower() in IMG_EXTENSIONS
        ]
        return cls(**by_name(names, range(len(names)), folder), folder=folder)

    def read(self, index: int) -> bytes:
        return (self.folder / self.names[index]).read_bytes()

    def stamp(self, index: int) -> int:
        return stamp_of(self.folder / self.names[index])

    def as_stored(self) -> "Folders":
        return self
