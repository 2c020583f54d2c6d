"""Recognition of a hundred handwritten digits in noisy views, which needs no download."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from facts.tasks.classification.base import Batch, Classification, Count, balanced
from facts.tasks.classification.digit_stream import NOISE, NOISE_IN_TRAINING, NUM_CLASSES, draw_digits
from facts.utils.cache import content_key
from facts.utils.options import options


@options
class Digits(Classification):
    """Which of a hundred handwritten digits is it? Training, calibration, searches and tests each have their own views.

    With so many classes that differ so little, a network needs its width, and every image has something to say.
    """

    num_calibration: Annotated[int, Field(ge=1, le=16384)] = 4096
    num_sensitivity: Count = 128
    num_factors_per_class: Count = 16
    num_held_out_per_class: Count = 8
    num_training: Count = 4096  # an epoch

    num_evaluation: ClassVar[int] = 3000

    def inspect(self) -> str:
        return f"{self.num_evaluation:,} test images, views of {NUM_CLASSES} digits that are part of scikit-learn"

    def content_key(self, model: nn.Module) -> str:
        return content_key(self, input_side(model))

    def calibration(self, model: nn.Module) -> list[Batch]:
        return _split(self._draw(model, "calibration", self.num_calibration), self.batch_size)

    def sensitivity(self, model: nn.Module) -> list[Batch]:
        # One batch: on networks this small a call costs more than its data.
        return [self._draw(model, "sensitivity", self.num_sensitivity)]

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

    def _draw(self, model: nn.Module, stream: str, count: int, noise: float = NOISE) -> Batch:
        return draw_digits(stream, count, input_side(model), noise)


def input_side(model: nn.Module) -> int:
    """Side of the square images that the model expects."""
    return model.pretrained_cfg["input_size"][-1]


def _split(data: tuple[Tensor, Tensor], batch_size: int) -> list[Batch]:
    return list(zip(*(torch.split(part, batch_size) for part in data), strict=True))
