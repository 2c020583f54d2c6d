"""Streams of noisy views of a hundred handwritten digits that scikit-learn ships: each image is new."""

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from facts.tasks.classification.digit_images import load_digits
from facts.utils.random import seed_of

NUM_CLASSES = 100
SIDE = 16
# Of the pixels, in the data set's own units of 0 to 16.
MEAN, STD = 4.9, 6.0
NOISE, NOISE_IN_TRAINING = 0.65, 0.7  # in units of STD
ROTATION, SCALE, SHIFT = math.radians(10), 0.1, 0.1  # at most; the shift as a fraction of the side
BLOCK = 2 * NUM_CLASSES


def draw_digits(stream: str, count: int, side: int = SIDE, noise: float = NOISE) -> tuple[Tensor, Tensor]:
    """The first images `[count, 1, side, side]` of a stream, and their labels `[count]`: which digit each is.

    Images are moved, noisy, normalised, and enlarged bilinearly. All draws follow from the stream's name: a shorter
    part is the beginning of a longer one. In every block of 200 each class comes twice.
    """
    blocks = [_block(stream, number, noise) for number in range(math.ceil(count / BLOCK))]
    images, labels = (torch.cat(parts)[:count] for parts in zip(*blocks, strict=True))
    return F.interpolate(images, size=(side, side), mode="bilinear"), labels


def _block(stream: str, number: int, noise: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed_of(stream, number))
    labels = torch.randperm(BLOCK, generator=generator) % NUM_CLASSES
    moved = move(_digits()[labels], ROTATION, SCALE, SHIFT, generator)
    return moved + noise * torch.randn(moved.shape, generator=generator), labels


@cache
def _digits() -> Tensor:
    """The first ten images of each digit, `[100, 1, SIDE, SIDE]`, normalised."""
    data = load_digits()
    first = [index for digit in range(10) for index in (data.target == digit).nonzero()[0][:10]]
    images = (torch.tensor(data.images[first], dtype=torch.float32)[:, None] - MEAN) / STD
    return F.interpolate(images, size=(SIDE, SIDE), mode="bilinear")


def move(images: Tensor, rotation: float, scale: float, shift: float, generator: torch.Generator) -> Tensor:
    """Rotate, scale and shift each image `[N, C, H, W]` by at most so many radians, and fractions of its side."""
    spread = torch.tensor([rotation, scale, 2 * shift, 2 * shift])
    angle, size, right, down = ((2 * torch.rand(len(images), 4, generator=generator) - 1) * spread).T
    cos, sin = (1 + size) * torch.cos(angle), (1 + size) * torch.sin(angle)
    matrices = torch.stack([torch.stack([cos, -sin, right], 1), torch.stack([sin, cos, down], 1)], 1)
    grid = F.affine_grid(matrices, list(images.shape), align_corners=False)
    # Sampling outside gives zero, which must be the background.
    background = images.amin(dim=(0, 2, 3), keepdim=True)
    return F.grid_sample(images - background, grid, align_corners=False) + background
