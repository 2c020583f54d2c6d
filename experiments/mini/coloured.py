"""The ten digits in colour, each light on a dark disc: training data for backbones, and the parts of scenes."""

from functools import cache
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torchvision.transforms.functional import normalize

from experiments.mini.digits import Digits, input_side, load_digits
from facts.tasks.classification.base import Batch
from facts.utils.numerics import seed_of, shuffled
from facts.utils.options import options

Split = Literal["train", "test"]

COUNT = 1797
SIDE = 32
DIAMETERS = range(24, SIDE + 1)
MARGIN = 0.1  # of the diameter, around the digit
NOISE = 0.04


@options
class ColouredDigits(Digits):
    """The digits in colour: 1,198 for training, the first to calibrate on, the last for searches; 599 for tests."""

    num_evaluation: ClassVar[int] = 599

    def inspect(self) -> str:
        return f"1,198 training and {self.num_evaluation} test digits in colour, made from those in scikit-learn"

    def _draw(self, model: nn.Module, stream: str, count: int, noise: float = 0) -> Batch:
        images, labels = load_coloured("test" if stream == "test" else "train", input_side(model))
        order = torch.arange(len(labels))
        if stream.startswith("training"):
            order = shuffled(len(labels), seed_of(stream))
        elif stream == "sensitivity":
            order = order.flip(0)
        return images[order[:count]], labels[order[:count]]


@options
class FewColouredDigits(ColouredDigits):
    """The same with few test images, for speed: accuracies mean nothing there, and large networks take long."""

    num_evaluation: ClassVar[int] = 64


def split_indices(split: Split) -> Tensor:
    """The positions of a split: every third image is a test image, the others are for training."""
    indices = torch.arange(COUNT)
    return indices[(indices % 3 == 0) == (split == "test")]


@cache
def load_coloured(split: Split, size: int) -> Batch:
    """Draw images `[N, 3, size, size]`, each with a digit, normalised like photos, and their labels `[N]`."""
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


def draw_ground(draw: np.random.Generator) -> np.ndarray:
    """Draw a dark colour, `[3]` values from 0 to 1."""
    return draw.uniform(0, 0.2, 3)


def draw_disc(draw: np.random.Generator, digit: np.ndarray, ground: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw a digit `[8, 8]` on a disc of random size and place in a square `[32, 32, 3]`; add its mask `[32, 32]`."""
    diameter = int(draw.choice(DIAMETERS))
    top, left = draw.integers(0, SIDE - diameter + 1, 2)
    dark, light = draw.uniform(0.25, 0.4, 3), draw.uniform(0.85, 1, 3)
    squares, ink = (np.arange(diameter) - (diameter - 1) / 2) ** 2, _enlarged(digit, diameter)[..., None]
    disc = squares[:, None] + squares <= (diameter / 2) ** 2
    image, mask = np.ones((SIDE, SIDE, 3)) * ground, np.zeros((SIDE, SIDE), bool)
    place = np.s_[top : top + diameter, left : left + diameter]
    image[place][disc] = (dark + ink * (light - dark))[disc]
    mask[place] = disc
    return image, mask


def photographed(draw: np.random.Generator, image: np.ndarray) -> np.ndarray:
    """Add some noise to an image of values from 0 to 1, and convert it to bytes."""
    return (255 * (image + draw.normal(0, NOISE, image.shape)).clip(0, 1)).astype(np.uint8)


def _enlarged(digit: np.ndarray, diameter: int) -> np.ndarray:
    """Enlarge a digit in the middle of the square around its disc."""
    margin = round(MARGIN * diameter)
    side = diameter - 2 * margin
    image = F.interpolate(torch.from_numpy(digit)[None, None], size=(side, side), mode="bilinear")
    return np.pad(image[0, 0].numpy(), margin)
