"""Image classification: top-1 accuracy on digits that ship with scikit-learn, or on ImageNet-1k."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import timm.data
import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from facts.cache import content_key
from facts.losses import kl_divergence, summed_cross_entropy
from facts.moments.data_pass import autocast, shown, to_device
from facts.tasks.base import Task
from facts.tasks.digits import load_images

Count = Annotated[int, Field(ge=1)]
Batch = tuple[Tensor, Tensor]
Augmentation = Literal["none", "train", "train_cutmix"]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Classification(Task):
    """Top-1 accuracy in percent, calibrated by cross-entropy on the given labels.

    `num_calibration` images give the factors; on `num_sensitivity` others searches compare outputs. Analyses take
    `num_factors_per_class` evaluation images of each class for the factors that they look at, and others,
    `num_held_out_per_class`, to compare with (paper, supplement on the comparison).
    """

    num_calibration: Count
    num_sensitivity: Count
    num_factors_per_class: Count = 16
    num_held_out_per_class: Count = 2
    batch_size: Count = 64

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return summed_cross_entropy(outputs, targets)

    def output_error(self, original: Tensor, changed: Tensor) -> Tensor:
        return kl_divergence(original, changed)

    def input_shape(self, model: nn.Module) -> tuple[int, ...]:
        return (1, *model.pretrained_cfg["input_size"])

    def evaluate(self, model: nn.Module, precision: torch.dtype = torch.float32) -> dict[str, float]:
        return {"top1": top1(model, self.evaluation(model), precision)}


def top1(model: nn.Module, batches: Iterable[Batch], precision: torch.dtype = torch.float32) -> float:
    """Percent of samples whose largest logit is their label."""
    device = next(model.parameters()).device
    correct, total = torch.zeros((), device=device, dtype=torch.int64), 0
    model.eval()
    for batch in shown(batches, "evaluation"):
        images, labels = to_device(batch, device)
        with torch.inference_mode(), autocast(device, precision):
            correct += (model(images).argmax(dim=-1) == labels).sum()
        total += len(labels)
    return 100 * correct.item() / total


def balanced(labels: Tensor, counts: Sequence[int], seed: int = 0) -> list[Tensor]:
    """Disjoint index sets, in shuffled order, with `counts` samples of every class each.

    Raises `ValueError` where a class has too few.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    one_hot = F.one_hot(labels[order])
    fewest = one_hot.sum(dim=0).min().item()
    if fewest < sum(counts):
        raise ValueError(
            f"num_factors_per_class + num_held_out_per_class needs {sum(counts)} evaluation images of every class; one "
            f"has {fewest}"
        )
    place = (one_hot.cumsum(dim=0) * one_hot).sum(dim=1) - 1  # how many of its class came before
    ends = list(itertools.accumulate(counts, initial=0))
    return [order[(start <= place) & (place < end)] for start, end in itertools.pairwise(ends)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Digits(Classification):
    """Handwritten digits: 1,198 to train and calibrate on, the last of them for searches, and 599 others to test on."""

    num_calibration: Annotated[int, Field(ge=1, le=1198)] = 1024
    num_sensitivity: Count = 128
    num_factors_per_class: Count = 32
    num_held_out_per_class: Count = 16

    num_evaluation: ClassVar[int] = 599

    def __post_init__(self):
        if self.num_calibration + self.num_sensitivity > 1198:
            raise ValueError(
                "num_calibration + num_sensitivity may be 1198, the number of training images; got "
                f"{self.num_calibration} + {self.num_sensitivity}"
            )

    def inspect(self) -> str:
        return "1,198 training and 599 test digits, part of scikit-learn"

    def content_key(self, model: nn.Module) -> str:
        return content_key(self, input_size(model))

    def calibration(self, model: nn.Module) -> list[Batch]:
        images, labels = load_images("train", input_size(model))
        return _split(images[: self.num_calibration], labels[: self.num_calibration], self.batch_size)

    def sensitivity(self, model: nn.Module) -> list[Batch]:
        images, labels = load_images("train", input_size(model))
        # One batch: on networks this small a call costs more than its data.
        return [(images[-self.num_sensitivity :], labels[-self.num_sensitivity :])]

    def analysis(self, model: nn.Module) -> tuple[list[Batch], list[Batch]]:
        images, labels = load_images("test", input_size(model))
        parts = balanced(labels, (self.num_factors_per_class, self.num_held_out_per_class))
        factors, held_out = (_split(images[part], labels[part], self.batch_size) for part in parts)
        return factors, held_out

    def evaluation(self, model: nn.Module) -> list[Batch]:
        return _split(*load_images("test", input_size(model)), 599)


def input_size(model: nn.Module) -> int:
    """Side of the square images that the model expects."""
    return model.pretrained_cfg["input_size"][-1]


def _split(images: Tensor, labels: Tensor, batch_size: int) -> list[Batch]:
    return list(zip(images.split(batch_size), labels.split(batch_size), strict=True))


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class ImageNet(Classification):
    """ImageNet-1k as class folders `root/train` and `root/val`.

    Of one seeded shuffle of the training images the first `num_sensitivity` are left for rank searches, the next
    `num_calibration` give the factors (paper, section 5.1). Images are resized to 256 (bicubic) and cropped to 224,
    or in proportion for another input size. `augmentation: train` calibrates on timm's training transform instead,
    `train_cutmix` with CutMix on top.
    """

    root: Path
    num_calibration: Count = 16384
    num_sensitivity: Count = 512
    augmentation: Augmentation = "none"
    num_workers: Annotated[int, Field(ge=0)] = 8
    seed: int = 0

    num_evaluation: ClassVar[int] = 50_000

    def inspect(self) -> str:
        training, validation = (len(self._files(split)) for split in ("train", "val"))
        return f"{training:,} training and {validation:,} validation images in class folders at {self.root}"

    def content_key(self, model: nn.Module) -> str:
        settings = {**vars(self), "root": None, "num_workers": None}
        files = (self._files(split).content_key for split in ("train", "val"))
        return content_key(*files, settings, _format(model))

    def calibration(self, model: nn.Module) -> "ImageBatches":
        chosen = slice(self.num_sensitivity, self.num_sensitivity + self.num_calibration)
        return self._training(model, chosen, self.augmentation)

    def sensitivity(self, model: nn.Module) -> "ImageBatches":
        return self._training(model, slice(self.num_sensitivity), "none")

    def _training(self, model: nn.Module, chosen: slice, augmentation: Augmentation) -> "ImageBatches":
        """A part of the shuffled training images."""
        training = self._files("train", self._transform(model, augmentation != "none"))
        needed = self.num_sensitivity + self.num_calibration
        if len(training) < needed:
            raise ValueError(
                f"{self.root / 'train'} holds {len(training)} images; num_sensitivity + num_calibration needs {needed}"
            )
        order = torch.randperm(len(training), generator=torch.Generator().manual_seed(self.seed))
        return self._batches(model, training, order[chosen].tolist(), augmentation)

    def _batches(
        self, model: nn.Module, files: "HashedFolder", indices: list[int], augmentation: Augmentation = "none"
    ) -> "ImageBatches":
        key = content_key(files.content_key, indices, self.batch_size, augmentation, self.seed, _format(model))
        mixup = None
        if augmentation == "train_cutmix":
            mixup = timm.data.Mixup(mixup_alpha=0.0, cutmix_alpha=1.0, num_classes=len(files.classes))
        return ImageBatches(self._loader(Subset(files, indices)), key, mixup)

    def analysis(self, model: nn.Module) -> tuple["ImageBatches", "ImageBatches"]:
        files = self._files("val", self._transform(model, augment=False))
        parts = balanced(
            torch.tensor(files.targets), (self.num_factors_per_class, self.num_held_out_per_class), self.seed
        )
        factors, held_out = (self._batches(model, files, part.tolist()) for part in parts)
        return factors, held_out

    def evaluation(self, model: nn.Module) -> DataLoader:
        return self._loader(self._files("val", self._transform(model, augment=False)))

    def _files(self, split: str, transform=None) -> "HashedFolder":
        folder = self.root / split
        if not folder.is_dir():
            raise FileNotFoundError(
                f"no ImageNet at {self.root}: expected the folders train/ and val/, each with one folder a class. "
                "Set task.paper.root to where they are."
            )
        return HashedFolder(folder, transform)

    def _transform(self, model: nn.Module, augment: bool):
        config = timm.data.resolve_model_data_config(model)
        if augment:
            return timm.data.create_transform(**config, is_training=True)
        size = config["input_size"][-1]
        return transforms.Compose(
            [
                transforms.Resize(size * 256 // 224, transforms.InterpolationMode.BICUBIC),
                transforms.CenterCrop(size),
                transforms.ToTensor(),
                transforms.Normalize(config["mean"], config["std"]),
            ]
        )

    def _loader(self, images) -> DataLoader:
        return DataLoader(
            images,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(self.seed),
        )


def _format(model: nn.Module) -> list:
    """What the model expects of an image."""
    config = timm.data.resolve_model_data_config(model)
    return [config[key] for key in ("input_size", "mean", "std")]


class HashedFolder(ImageFolder):
    """An image folder that knows a hash of its file names, relative to itself."""

    @property
    def content_key(self) -> str:
        names = "\n".join(str(Path(path).relative_to(self.root)) for path, _ in self.samples)
        return hashlib.sha256(names.encode()).hexdigest()[:16]


@plain_dataclass(frozen=True)
class ImageBatches:
    """Batches from a loader, under a key that spares hashing the pixels."""

    loader: DataLoader
    content_key: str
    mixup: timm.data.Mixup | None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        for images, labels in self.loader:
            yield (images, labels) if self.mixup is None else self.mixup(images, labels)
