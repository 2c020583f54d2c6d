"""Recognition of a hundred handwritten digits in noisy views: every image is new, and nothing is downloaded."""

import math
from functools import cache, lru_cache
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from facts.tasks.classification.base import Batch, Classification, balanced
from facts.utils.cache import content_key
from facts.utils.numerics import seed_of
from facts.utils.options import Count, Seed, needing, options

NUM_CLASSES = 100
SIDE = 16
MEAN, STD = 4.9, 6.0  # of the pixels, in the data set's own units from 0 to 16
NOISE, NOISE_IN_TRAINING = 0.65, 0.7  # in units of STD
ROTATION, SCALE, SHIFT = math.radians(10), 0.1, 0.1  # at most; the shift as a fraction of the side
BLOCK = 2 * NUM_CLASSES


@options
class Digits(Classification):
    """Which of a hundred handwritten digits is it? Training, calibration, searches and tests have their own views."""

    num_calibration: Annotated[int, Field(ge=1, le=16384)] = 4096
    num_sensitivity: Count = 128
    num_factors_per_class: Count = 16
    num_held_out_per_class: Count = 8
    num_training: Count = 4096  # per epoch
    seed: Seed = 0  # of the images for calibration and searches

    num_evaluation: ClassVar[int] = 3000

    def inspect(self) -> str:
        return f"{self.num_evaluation:,} test images, views of {NUM_CLASSES} digits in scikit-learn"

    def content_key(self, model: nn.Module) -> str:
        return content_key(self, input_side(model))

    def calibration(self, model: nn.Module) -> list[Batch]:
        return _split(self._draw(model, self._stream("calibration"), self.num_calibration), self.batch_size)

    def sensitivity(self, model: nn.Module) -> list[Batch]:
        # One batch: on networks this small a call costs more than its data.
        return [self._draw(model, self._stream("sensitivity"), self.num_sensitivity)]

    def training(self, model: nn.Module, epoch: int, seed: int = 0) -> list[Batch]:
        data = self._draw(model, f"training {seed} {epoch}", self.num_training, NOISE_IN_TRAINING)
        return _split(data, self.batch_size)

    def analysis(self, model: nn.Module) -> tuple[list[Batch], list[Batch]]:
        images, labels = self._draw(model, "test", self.num_evaluation)
        parts = balanced(labels, (self.num_factors_per_class, self.num_held_out_per_class))
        factors, held_out = (_split((images[part], labels[part]), self.batch_size) for part in parts)
        return factors, held_out

    def evaluation(self, model: nn.Module) -> list[Batch]:
        return _split(self._draw(model, "test", self.num_evaluation), 500)

    def _stream(self, name: str) -> str:
        return f"{name} {self.seed}" if self.seed else name

    def _draw(self, model: nn.Module, stream: str, count: int, noise: float = NOISE) -> Batch:
        return draw_digits(stream, count, input_side(model), noise)


def input_side(model: nn.Module) -> int:
    """Side of the square images that the model expects."""
    return model.pretrained_cfg["input_size"][-1]


def _split(data: Batch, batch_size: int) -> list[Batch]:
    return list(zip(*(torch.split(part, batch_size) for part in data), strict=True))


def load_digits() -> Any:
    """Load scikit-learn's images `[1797, 8, 8]`, with values from 0 to 16, and their `target`."""
    with needing("experiments", "the embedded data set"):
        from sklearn.datasets import load_digits
    return load_digits()


@lru_cache(maxsize=4)
def draw_digits(stream: str, count: int, side: int = SIDE, noise: float = NOISE) -> Batch:
    """Draw the first images `[count, 1, side, side]` of a stream, and their labels `[count]`: which digit each is.

    Images are moved, noisy, normalised, and enlarged bilinearly. All draws follow from the stream's name, so
    a shorter part is the beginning of a longer one. Each class appears twice in every block of 200.
    """
    blocks = [_block(stream, number, noise) for number in range(math.ceil(count / BLOCK))]
    images, labels = (torch.cat(parts)[:count] for parts in zip(*blocks, strict=True))
    return F.interpolate(images, size=(side, side), mode="bilinear"), labels


def _block(stream: str, number: int, noise: float) -> Batch:
    generator = torch.Generator().manual_seed(seed_of(stream, number))
    labels = torch.randperm(BLOCK, generator=generator) % NUM_CLASSES
    moved = move(_originals()[labels], ROTATION, SCALE, SHIFT, generator)
    return moved + noise * torch.randn(moved.shape, generator=generator), labels


@cache
def _originals() -> Tensor:
    """The first ten images of each digit, `[100, 1, SIDE, SIDE]`, normalised."""
    data = load_digits()
    first = [index for digit in range(10) for index in (data.target == digit).nonzero()[0][:10]]
    images = (torch.tensor(data.images[first], dtype=torch.float32)[:, None] - MEAN) / STD
    return F.interpolate(images, size=(SIDE, SIDE), mode="bilinear")


def move(images: Tensor, rotation: float, scale: float, shift: float, generator: torch.Generator) -> Tensor:
    """Randomly rotate (in radians), scale and shift (as fractions) each image `[N, C, H, W]`, up to these limits."""
    spread = torch.tensor([rotation, scale, 2 * shift, 2 * shift])
    angle, size, right, down = ((2 * torch.rand(len(images), 4, generator=generator) - 1) * spread).T
    cos, sin = (1 + size) * torch.cos(angle), (1 + size) * torch.sin(angle)
    matrices = torch.stack([torch.stack([cos, -sin, right], 1), torch.stack([sin, cos, down], 1)], 1)
    grid = F.affine_grid(matrices, list(images.shape), align_corners=False)
    # Sampling outside gives zero, which must be the background.
    background = images.amin(dim=(0, 2, 3), keepdim=True)
    return F.grid_sample(images - background, grid, align_corners=False) + background
