"""Ten digits in colour, for the backbones of detectors and segmenters: each on a disc somewhere in the image."""

from functools import cache
from typing import ClassVar, Literal

import numpy as np
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torchvision.transforms.functional import normalize

from facts.tasks.classification.base import Batch
from facts.tasks.classification.digit_discs import SIDE, draw_disc, draw_ground, photographed
from facts.tasks.classification.digit_images import load_digits
from facts.tasks.classification.digits import Digits
from facts.utils.options import options
from facts.utils.random import seed_of

Split = Literal["train", "test"]

COUNT = 1797


def split_indices(split: Split) -> Tensor:
    """The positions of a split: every third image is a test image, the others are for training."""
    indices = torch.arange(COUNT)
    return indices[(indices % 3 == 0) == (split == "test")]


@cache
def load_coloured(split: Split, size: int) -> tuple[Tensor, Tensor]:
    """The digits of a split `[N, 3, size, size]`, normalised as photos are, and their labels `[N]`.

    Each digit is in one of the 32 x 32 squares of its image.
    """
    draw, data, indices = np.random.default_rng(split == "test"), load_digits(), split_indices(split).numpy()
    images = np.zeros((len(indices), size, size, 3), np.uint8)
    for digit, image in zip(data.images[indices] / 16, images, strict=True):
        ground = draw_ground(draw)
        top, left = SIDE * draw.integers(0, size // SIDE, 2)
        canvas = np.ones(image.shape) * ground
        canvas[top : top + SIDE, left : left + SIDE], _ = draw_disc(draw, digit, ground)
        image[:] = photographed(draw, canvas)
    pixels = torch.from_numpy(images).movedim(-1, 1) / 255
    return normalize(pixels, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD), torch.tensor(data.target[indices])


@options
class ColouredDigits(Digits):
    """The digits in colour: 1,198 for training, the first to calibrate on, the last for searches; 599 for tests."""

    num_evaluation: ClassVar[int] = 599

    def inspect(self) -> str:
        return "1,198 training and 599 test digits in colour, drawn from those that are part of scikit-learn"

    def _draw(self, model: nn.Module, stream: str, count: int, noise: float = 0) -> Batch:
        images, labels = load_coloured("test" if stream == "test" else "train", model.pretrained_cfg["input_size"][-1])
        order = torch.arange(len(labels))
        if stream.startswith("training"):
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed_of(stream)))
        elif stream == "sensitivity":
            order = order.flip(0)
        return images[order[:count]], labels[order[:count]]
