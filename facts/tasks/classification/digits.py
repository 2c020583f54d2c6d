"""The 1797 handwritten digits of 8 x 8 pixels that scikit-learn ships: a data set that needs no download."""

from functools import cache
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from sklearn.datasets import load_digits
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torchvision.transforms.functional import normalize

from facts.tasks.classification.base import Batch, Classification, Count, balanced
from facts.tasks.classification.digit_discs import SIDE, draw_disc, draw_ground, photographed
from facts.utils.cache import content_key
from facts.utils.random import seed_of

Split = Literal["train", "test"]

COUNT = 1797
# Of the training split, in the data set's own units of 0 to 16.
MEAN, STD = 4.9, 6.0


def split_indices(split: Split) -> Tensor:
    """The positions of a split: every third image is a test image, the others are for training."""
    indices = torch.arange(COUNT)
    return indices[(indices % 3 == 0) == (split == "test")]


def load_images(split: Split, size: int, channels: int = 1) -> tuple[Tensor, Tensor]:
    """Normalised images `[N, channels, size, size]`, and their labels `[N]`.

    With one channel they are grey, and enlarged bilinearly; with three, each digit is on a disc in one of the 32 x 32
    squares of the image.
    """
    labels = torch.tensor(load_digits().target)[split_indices(split)]
    if channels == 3:
        return _coloured(split, size), labels
    images = (torch.tensor(load_digits().images, dtype=torch.float32)[split_indices(split), None] - MEAN) / STD
    return F.interpolate(images, size=(size, size), mode="bilinear"), labels


@cache
def _coloured(split: Split, size: int) -> Tensor:
    """The digits of a split on discs `[N, 3, size, size]`, normalised as photos are."""
    draw = np.random.default_rng(split == "test")
    digits = load_digits().images[split_indices(split).numpy()] / 16
    images = np.zeros((len(digits), size, size, 3), np.uint8)
    for digit, image in zip(digits, images, strict=True):
        ground = draw_ground(draw)
        top, left = SIDE * draw.integers(0, size // SIDE, 2)
        canvas = np.ones(image.shape) * ground
        canvas[top : top + SIDE, left : left + SIDE], _ = draw_disc(draw, digit, ground)
        image[:] = photographed(draw, canvas)
    pixels = torch.from_numpy(images).movedim(-1, 1) / 255
    return normalize(pixels, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Digits(Classification):
    """Handwritten digits: 1,198 for training and calibration, the last of these for searches, and 599 for testing."""

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
        side, _ = input_size(model)  # the channels follow from the model, which is hashed separately
        return content_key(self, side)

    def calibration(self, model: nn.Module) -> list[Batch]:
        images, labels = load_images("train", *input_size(model))
        return _split(images[: self.num_calibration], labels[: self.num_calibration], self.batch_size)

    def sensitivity(self, model: nn.Module) -> list[Batch]:
        images, labels = load_images("train", *input_size(model))
        # One batch: on networks this small a call costs more than its data.
        return [(images[-self.num_sensitivity :], labels[-self.num_sensitivity :])]

    def training(self, model: nn.Module, epoch: int, seed: int = 0) -> list[Batch]:
        """All training images, not augmented: finetuning takes few epochs."""
        images, labels = load_images("train", *input_size(model))
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed_of(seed, epoch)))
        return _split(images[order], labels[order], self.batch_size)

    def analysis(self, model: nn.Module) -> tuple[list[Batch], list[Batch]]:
        images, labels = load_images("test", *input_size(model))
        parts = balanced(labels, (self.num_factors_per_class, self.num_held_out_per_class))
        factors, held_out = (_split(images[part], labels[part], self.batch_size) for part in parts)
        return factors, held_out

    def evaluation(self, model: nn.Module) -> list[Batch]:
        return _split(*load_images("test", *input_size(model)), 599)


def input_size(model: nn.Module) -> tuple[int, int]:
    """Side and number of channels of the square images that the model expects."""
    channels, _, side = model.pretrained_cfg["input_size"]
    return side, channels


def _split(images: Tensor, labels: Tensor, batch_size: int) -> list[Batch]:
    return list(zip(images.split(batch_size), labels.split(batch_size), strict=True))
