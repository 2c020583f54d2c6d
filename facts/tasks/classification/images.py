"""Image classification on photos: how they are decoded, transformed, batched and labelled; ImageNet, and your own."""

import logging
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import timm.data
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate
from torchvision import transforms

from facts.modules.networks import is_transformers, problem_of
from facts.moments.losses import DECLARED
from facts.tasks.base import by_workers, chosen_indices_of, fields_of
from facts.tasks.classification.base import (
    Batch,
    Classification,
    balanced,
    data_config,
    halves,
    num_classes,
    preprocessing_key,
    processed_for,
)
from facts.tasks.classification.files import (
    TABLE,
    Found,
    ImageFiles,
    find_imagenet,
    find_images,
    first_few,
    synsets,
)
from facts.utils.batches import NumberedBatches
from facts.utils.cache import content_key
from facts.utils.numerics import seed_of, seeded, shuffled
from facts.utils.options import Count, options
from facts.utils.progress import with_progress

Augmentation = Literal["none", "train"]
Transform = Literal["paper", "crop", "timm"]

# DeiT's defaults, like Mixup's below, except mmax9: at magnitude 10 timm has Pillow posterize images to 0 bits.
DEIT_TRANSFORM: dict[str, Any] = {"auto_augment": "rand-m9-mstd0.5-mmax9-inc1", "re_prob": 0.25, "re_mode": "pixel"}

NUM_REFERENCE = 10_000  # a linear probe of 1,000 classes then takes a minute or two
MOST_BROKEN = 0.001  # of all images; a table's numbers must not depend on them
NUM_DECODED = 1000  # images of a part that are looked at before any work
LONGEST = 100  # times the shorter side; resizing a longer strip by its shorter side would take gigabytes
log = logging.getLogger(__name__)


@options
class Images(Classification):
    """Images at `root`, some of them for calibration and training, others for evaluation.

    `transform: paper` resizes to 256 (bicubic) and crops to 224, or in proportion for another input size; `crop` only
    crops; `timm` uses the checkpoint's evaluation transform or, for a transformers model, its image processor.
    `augmentation: train` calibrates with timm's training transform instead. `training_augmentation` is for finetuning,
    which uses all training images: `deit` crops, flips, applies RandAugment, erases, and mixes images by Mixup or
    CutMix; `crop` crops, flips and jitters colours.

    The loader runs `num_workers` processes (default: one per processor, up to 16).
    """

    root: Path
    num_sensitivity: Count = 512
    transform: Transform = "timm"
    augmentation: Augmentation = "none"
    training_augmentation: Literal["crop", "deit"] = "deit"
    num_workers: Annotated[int, Field(ge=0)] | None = None
    seed: int = 0

    most_broken: ClassVar[float] = MOST_BROKEN

    @property
    @abstractmethod
    def training_images(self) -> ImageFiles:
        """All images for calibration, searches and training."""

    @property
    @abstractmethod
    def validation_images(self) -> ImageFiles:
        """All images for evaluation."""

    @property
    @abstractmethod
    def classes(self) -> Sequence[str]:
        """Names of the classes; the images' labels are positions among them."""

    def labels(self, model: nn.Module) -> list[int] | None:
        """The network's label `[C]` for each class; None if these are not the network's classes."""
        return [*range(len(self.classes))]

    @abstractmethod
    def chosen_indices(self) -> dict[str, list[int]]:
        """Indices of the training images for `sensitivity` and for `calibration`, in order."""

    def content_key(self, model: nn.Module) -> str:
        files = (self.training_images.content_key, self.validation_images.content_key)
        return content_key(*files, self.labels(model), fields_of(self), preprocessing_key(model))

    def calibration(self, model: nn.Module) -> NumberedBatches:
        return self._batches(model, self.training_images, self.chosen_indices()["calibration"], self.augmentation)

    def sensitivity(self, model: nn.Module) -> NumberedBatches:
        return self._batches(model, self.training_images, self.chosen_indices()["sensitivity"])

    def training(self, model: nn.Module, epoch: int, seed: int = 0) -> NumberedBatches:
        """All training images. Raises `ValueError` if their classes are not the network's."""
        self._need_labels(model)
        images = self.training_images
        order = shuffled(len(images), seed_of(seed, epoch)).tolist()
        deit = self.training_augmentation == "deit"
        mixup = timm.data.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=num_classes(model)) if deit else None
        settings = {**data_config(model), **(DEIT_TRANSFORM if deit else {})}
        transform = timm.data.create_transform(**settings, is_training=True)
        files, seeds = images.selected(order), (seed, epoch)
        items = DecodedBatches(files, transform, self.batch_size, seeds, mixup, for_training=True)
        return self._loaded(model, items, content_key(self.content_key(model), *seeds))

    def analysis(self, model: nn.Module) -> tuple[NumberedBatches, NumberedBatches]:
        images = self.validation_images
        counts = (self.num_factors_per_class, self.num_held_out_per_class)
        parts = balanced(torch.from_numpy(images.labels), counts, self.seed)
        factors, held_out = (self._batches(model, images, part.tolist()) for part in parts)
        return factors, held_out

    def evaluation(self, model: nn.Module) -> NumberedBatches:
        """All evaluation images. Raises `ValueError` if their classes are not the network's."""
        self._need_labels(model)
        return self._batches(model, self.validation_images)

    def for_features(self, model: nn.Module) -> tuple[NumberedBatches, NumberedBatches]:
        """Images to learn classes of features from, at most `NUM_REFERENCE`, and all evaluation images."""
        images = self.training_images
        chosen = shuffled(len(images), self.seed)[:NUM_REFERENCE].tolist()
        return self._batches(model, images, chosen), self._batches(model, self.validation_images)

    def chosen_images(self) -> dict[str, dict[str, list]]:
        """The `indices` and `names` of the images for `sensitivity` and for `calibration`, in order."""
        chosen = self.chosen_indices()
        return {use: {"indices": at, "names": self.training_images.selected(at).names} for use, at in chosen.items()}

    def _need_labels(self, model: nn.Module) -> None:
        if self.labels(model) is None:
            number = "does not record num_classes" if (total := num_classes(model)) is None else f"{total} classes"
            found = f"{self.root} has {len(self.classes)} class folders, and the network {number}"
            raise ValueError(f"these images need labels: {found}. Give a folder for each class, named by synset or not")

    def _batches(
        self,
        model: nn.Module,
        images: ImageFiles,
        indices: Sequence[int] | None = None,
        augmentation: Augmentation = "none",
    ) -> NumberedBatches:
        """Batches of the images at `indices` (default: all), without labels if their classes are not the network's."""
        files = images if indices is None else images.selected(indices)
        how = (self.transform, augmentation, preprocessing_key(model), self.batch_size, self.seed)
        key = content_key(files.content_key, self.labels(model), *how)
        items = DecodedBatches(files, self._transform(model, augmentation), self.batch_size, (self.seed,))
        return self._loaded(model, items, key)

    def _loaded(self, model: nn.Module, items: "DecodedBatches", key: str) -> NumberedBatches:
        channels = data_config(model)["input_size"][0]
        if channels not in (1, 3):
            raise ValueError(f"the network reads {channels} channels, and files have 1 or 3: make batches in Python")
        if channels == 1:
            items = replace(items, transform=transforms.Compose([transforms.Grayscale(), items.transform]))
        labels = self.labels(model)
        if labels is not None:
            items = replace(items, files=replace(items.files, labels=np.array(labels)[items.files.labels]))
        finish = Decodable(len(items.files), labels is not None, self.most_broken)
        return NumberedBatches(items, finish, key, range(len(items)), by_workers(self.num_workers, pin_memory=True))

    def _transform(self, model: nn.Module, augmentation: Augmentation) -> Callable[[Image.Image], Tensor]:
        config = data_config(model)
        if augmentation != "none":
            return timm.data.create_transform(**config, is_training=True)
        if self.transform == "timm":
            return processed_for(model) or timm.data.create_transform(**config, is_training=False)
        size, scaled = config["input_size"][1:], transforms.Normalize(config["mean"], config["std"])
        steps = [transforms.CenterCrop(size), transforms.ToTensor(), scaled]
        if self.transform == "paper":
            steps.insert(0, transforms.Resize(max(size) * 256 // 224, transforms.InterpolationMode.BICUBIC))
        return transforms.Compose(steps)


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
        return find_imagenet(self.root, "train")

    @cached_property
    def validation_images(self) -> ImageFiles:
        return find_imagenet(self.root, "val")

    def inspect(self) -> str:
        self.chosen_indices()
        training, validation = len(self.training_images), len(self.validation_images)
        return f"{training:,} training and {validation:,} validation images of 1,000 classes at {self.root}"

    chosen_indices = chosen_indices_of


@options
class ImageFolder(Images):
    """Images in `root/<class>/`; or in `root/train/<class>/` and, for evaluation, in `val`, `valid`, `dev`, `test`, ...

    The part for training may be called `calibration` too. Folders in a class folder belong to the class. A file
    `labels.csv` in `root`, with columns `file` and `label`, can list the images, whose labels are then the network's
    own. `root` can also be a Hugging Face data set: `hub:OWNER/DATASET`, optionally with `/CONFIGURATION` and `/SPLIT`,
    Parquet files, or the output of `save_to_disk`; its columns are found by their types, `Image` and `ClassLabel`.

    Unless both parts exist, half of each class is held out for evaluation, the same half for every `seed`; with
    `whole`, all images serve both purposes. A folder named like a part is a class if it has no subfolders but other
    folders next to it. A warning counts every file and folder that is left out, except hidden ones. A label is the
    index of the class, of folders in sorted order; or among ImageNet's synsets, if the network has 1,000 classes and
    all classes are named by synset; or the label of that name in a transformers model that has all the names. If the
    numbers of classes differ, images have no labels and evaluation is not possible. `num_calibration` and
    `num_sensitivity` are upper bounds; searches compare outputs on images that are also used for the factors.
    """

    num_calibration: Count = 512
    whole: bool = False

    most_broken: ClassVar[float] = 0.1

    def without_broken(self) -> Self:
        """The same images without those that cannot be decoded among the first thousand of each part, with a warning.

        Raises `ValueError` if they are more than a tenth.
        """
        task, sound = replace(self), cache(decodable)  # both parts may be the same images
        vars(task).update(_found=self._found, _splits=[sound(part, self.most_broken) for part in self._splits])
        return task

    @property
    def training_images(self) -> ImageFiles:
        return self._splits[0]

    @property
    def validation_images(self) -> ImageFiles:
        return self._splits[1]

    @property
    def classes(self) -> list[str]:
        return self._found.classes

    def labels(self, model: nn.Module) -> list[int] | None:
        total = num_classes(model)
        by_name: dict[str, int] = (model.config.label2id or {}) if is_transformers(model) else {}
        if total is None or problem_of(model) in DECLARED:  # an image is of one class, and the network says others
            return None
        if self._found.numbered and total:
            if len(self.classes) > total:
                most = f"{self.root / TABLE} has labels up to {len(self.classes) - 1}"
                raise ValueError(f"{most}, and those of the network end at {total - 1}: count them from 0")
            return [*range(len(self.classes))]
        if self.classes and total == len(synsets()) and set(self.classes) <= set(synsets()):
            return [synsets().index(name) for name in self.classes]
        if self.classes and by_name.keys() >= set(self.classes):
            return [by_name[name] for name in self.classes]
        if total and all(name.isdecimal() for name in self.classes) and sorted(self.classes, key=int) != self.classes:
            raise ValueError(
                f"the class folders {self.root}/* are numbers, whose order as text ({', '.join(self.classes[:3])}, ...)"
                f" is another one: list the images with the network's labels in {TABLE}, or pad the numbers with zeros"
            )
        # An encoder has no classes: labels are positions.
        return [*range(len(self.classes))] if self.classes and total in (0, len(self.classes)) else None

    def inspect(self) -> str:
        used = f"{len(self.training_images):,} images to calibrate on, {len(self.validation_images):,} to evaluate on"
        return f"{used}, {len(self.classes)} classes at {self.root}"

    def chosen_indices(self) -> dict[str, list[int]]:
        order = shuffled(len(self.training_images), self.seed).tolist()
        return {"sensitivity": order[: self.num_sensitivity], "calibration": order[: self.num_calibration]}

    @cached_property
    def _found(self) -> Found:
        return find_images(self.root)

    @cached_property
    def _splits(self) -> list[ImageFiles]:
        """The images for calibration and for evaluation. Raises `ValueError` if there are none, or without labels."""
        training, *evaluation = self._found.parts.values()
        if (training.labels < 0).any():
            raise ValueError(f"{self.root} has images without labels: remove these rows, or the column of classes")
        if evaluation or self.whole:
            return [training, *(evaluation or [training])]
        return [training.selected(half) for half in halves(training.labels)]


def decode(data: bytes) -> Image.Image:
    """Decode an image to RGB; 16-bit greyscale keeps its shades.

    Raises `ValueError` for a broken file, too many pixels for Pillow, a strip more than 100 times as long as it is
    wide, and pixels of unknown range (floating point or 32 bits).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image: Image.Image = Image.open(BytesIO(data))
        if max(image.size) > LONGEST * min(image.size):
            raise ValueError(f"{image.width} x {image.height} pixels are a strip")
        if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):  # these have 16 bits
            raise ValueError("the range of its pixels is not known")
        if image.mode.startswith("I"):  # Pillow's own conversion turns all but the darkest pixels white
            image = image.convert("I").point(lambda value: value / 257).convert("L")
        return image.convert("RGB")
    except Exception as error:  # Pillow's errors differ by format
        raise ValueError(f"no usable image: {error}") from error


def decodable(files: ImageFiles, most_broken: float) -> ImageFiles:
    """Leave out those of the first `NUM_DECODED` images that cannot be decoded; `Decodable` says how many may be."""
    check = Decodable(len(files), most_broken=most_broken)
    for index in with_progress(range(min(len(files), NUM_DECODED)), "looking for broken images"):
        try:
            decode(files.read(index))
        except ValueError:
            check((None, [files.names[index]]))
    return files.selected([index for index, name in enumerate(files.names) if name not in check.corrupt])


@dataclass(frozen=True)
class DecodedBatches(Dataset):
    """Batches of transformed images and their labels, each with the names of images that could not be decoded.

    Random transforms and `mixup` depend on `seed` and the batch number. With `for_training`, a smaller last batch is
    dropped, and a batch in which no image can be decoded raises `ValueError`, since steps are counted in batches.
    """

    files: ImageFiles
    transform: Callable[[Image.Image], Tensor]
    batch_size: int
    seed: tuple[int, ...]
    mixup: timm.data.Mixup | None = None
    for_training: bool = False

    def __len__(self) -> int:
        total = len(self.files)
        return total // self.batch_size if self.for_training else -(-total // self.batch_size)

    def __getitem__(self, number: int) -> tuple[Batch | None, list[str]]:
        indices = range(len(self.files))[number * self.batch_size :][: self.batch_size]
        samples, corrupt = [], []
        with seeded(*self.seed, number):
            for index in indices:
                data = self.files.read(index)
                try:
                    image = decode(data)
                except ValueError:
                    corrupt.append(self.files.names[index])
                else:
                    samples.append((self.transform(image), int(self.files.labels[index])))
            if not samples and self.for_training:
                message = f"no image of a training batch can be decoded: {first_few(corrupt)}"
                raise ValueError(f"{message}; fetch them again, or raise batch_size")
            if not samples:
                return None, corrupt
            images, labels = default_collate(samples)
            even = len(images) // 2 * 2  # an image without a partner is dropped
            return self.mixup(images[:even], labels[:even]) if self.mixup else (images, labels), corrupt


@dataclass(frozen=True)
class Decodable:
    """Pass on the batches of `DecodedBatches` over `total` images, without labels unless `with_labels`.

    Each image that cannot be decoded is logged once. Raises `ValueError` if there are several of them and they
    exceed the fraction `most_broken` of all images; each process counts its own.
    """

    total: int
    with_labels: bool = True
    most_broken: float = MOST_BROKEN
    corrupt: set[str] = field(default_factory=set)

    def __call__(self, item: tuple[Batch | None, list[str]]) -> Batch | Tensor | None:
        batch, corrupt = item
        for name in set(corrupt) - self.corrupt:
            self.corrupt.add(name)
            log.warning("%s cannot be decoded and is left out (%d so far)", name, len(self.corrupt))
        if len(self.corrupt) > max(1, self.total * self.most_broken):
            message = f"{len(self.corrupt)} of {self.total} images cannot be decoded: {first_few(self.corrupt)}"
            allowed = f"at most one in {1 / self.most_broken:,.0f} may be left out"
            raise ValueError(f"{message}; {allowed}: fetch them again, or remove them")
        return batch if self.with_labels or batch is None else batch[0]
