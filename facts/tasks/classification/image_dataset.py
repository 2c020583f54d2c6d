"""Image classification on a data set of Hugging Face's `datasets`: at the hub, or on this machine."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from facts.tasks.classification.image_files import ImageFiles, Rows, columns_of, is_dataset, splits_of
from facts.tasks.classification.image_folder import EVALUATION, TRAINING, ImageFolder
from facts.utils.options import options

if TYPE_CHECKING:
    from datasets import Dataset


@options
class ImageDataset(ImageFolder):
    """Images of `hub:OWNER/DATASET`, with `/CONFIGURATION` and `/SPLIT` if wanted, or of a folder on this machine.

    The folder holds Parquet files, or was written by `save_to_disk`. The column of images and that of classes are found
    by their types, `Image` and `ClassLabel`. The split `train` is for calibration, and `val`, `validation` or `test`
    for evaluation, if it has labels; a split alone is divided as in `ImageFolder`. Classes have the labels of the
    network's classes of the same names, if it has all of these; else their positions, if there are as many.
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
    """Images by the name of a folder, or of a data set. Raises `ValueError` or an `OSError` if there are none."""
    kind = ImageDataset if is_dataset(source) else ImageFolder
    images = kind(root=Path(source).expanduser(), **options)
    images.inspect()
    return images
