"""The 1797 handwritten digits of 8 x 8 pixels that scikit-learn ships: a data set that needs no download."""

from typing import Literal

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

Split = Literal["train", "test"]

COUNT = 1797
# Of the training split, in the data set's own units of 0 to 16.
MEAN, STD = 4.9, 6.0


def split_indices(split: Split) -> Tensor:
    """The positions of a split: every third image is a test image, the others are for training."""
    indices = torch.arange(COUNT)
    return indices[(indices % 3 == 0) == (split == "test")]


def load_images(split: Split, size: int) -> tuple[Tensor, Tensor]:
    """Normalised images `[N, 1, size, size]`, enlarged bilinearly, and their labels `[N]`."""
    digits = load_digits()
    indices = split_indices(split)
    images = (torch.tensor(digits.images, dtype=torch.float32)[indices, None] - MEAN) / STD
    return F.interpolate(images, size=(size, size), mode="bilinear"), torch.tensor(digits.target)[indices]
