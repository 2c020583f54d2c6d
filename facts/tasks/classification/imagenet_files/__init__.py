"""ImageNet-1k on disk, in one of three layouts."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from facts.tasks.classification.imagenet_files import folders, parquet, tars
from facts.tasks.classification.imagenet_files.base import ImageFiles, Split, synsets

__all__ = ["ImageFiles", "Split", "find_images", "synsets"]


class Layout(NamedTuple):
    what: str
    needed: tuple[str, ...]
    """Patterns of paths within the root."""
    open: Callable[[Path, Split], ImageFiles]


LAYOUTS = (
    Layout("class folders", folders.NEEDED, folders.Folders.of),
    Layout("the original tar files", tars.NEEDED, tars.tar_images),
    Layout("parquet shards", parquet.NEEDED, parquet.Shards.of),
)


def find_images(root: Path, split: Split) -> ImageFiles:
    """Find the images of a split, in the first layout that is complete.

    Raises `FileNotFoundError` if none is, and `ValueError` if its files are not ImageNet-1k's or are damaged.
    """
    for layout in LAYOUTS:
        if all(any(root.glob(pattern)) for pattern in layout.needed):
            return layout.open(root, split)
    wanted = "; or ".join(f"{layout.what} ({', '.join(layout.needed)})" for layout in LAYOUTS)
    found = [pattern for layout in LAYOUTS for pattern in layout.needed if any(root.glob(pattern))]
    raise FileNotFoundError(
        f"no ImageNet at {root}: looked for {wanted}; found {', '.join(found) or 'none of these'}. Set "
        "root to a folder that holds one of the three."
    )
