"""Inputs without labels as lessons: the original says what their outputs should be."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from facts.compression.data import Batch
from facts.cost.trace import has_row_per_sample
from facts.finetuning.views import are_photos, random_views
from facts.modules.modes import autocast, evaluating
from facts.modules.networks import run
from facts.moments.losses import OutputError
from facts.utils import distributed
from facts.utils.batches import batch_size, in_parts, to_device
from facts.utils.cache import calibration_key, content_key
from facts.utils.random import seeded


@dataclass(frozen=True)
class Inputs:
    """The inputs of some batches, in parts of about `part_size` samples, of which every `every`-th is `held_back`.

    `num_parts` are left to train on, `num_samples` in all. With `views`, photos are seen in random crops and flips.
    """

    data: Iterable[Batch]
    output_error: OutputError
    part_size: int
    views: bool
    every: int
    held_back: list[Any]
    num_parts: int
    num_samples: int

    @classmethod
    def of(
        cls, data: Iterable[Batch], output_error: OutputError, part_size: int, held_back: float, views: bool
    ) -> Self:
        """Read the data once, and hold back about this fraction. Raises `ValueError` for a single sample."""
        every, sizes, held, last = max(2, round(1 / held_back)), [], [], None
        for number, last in enumerate(part for batch in data for part in _parts(batch, part_size)):
            sizes.append(batch_size(last))
            if _is_held_back(number, every):
                held.append(last)
        if len(sizes) == 1 and sizes[0] > 1:  # a part to learn from, and one to judge by
            return cls.of(data, output_error, -(-sizes[0] // 2), held_back, views)
        if len(sizes) < 2:
            raise ValueError("recovery needs two samples or more: some to learn from, and others to tell when to stop")
        if not held:
            every, held = len(sizes), [last]
        num_samples = sum(sizes) - sum(map(batch_size, held))
        return cls(data, output_error, part_size, views, every, held, len(sizes) - len(held), num_samples)

    def content_key(self, model: nn.Module) -> str:
        return content_key(calibration_key(self.data), self.part_size, self.every, self.views)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        raise NotImplementedError("inputs without labels have no loss of their own")

    def distillation_error(self, original: Any, changed: Any, temperature: float) -> Tensor:
        return self.output_error(original, changed)

    def training(self, model: nn.Module, epoch: int, seed: int = 0) -> "_Epoch":
        return _Epoch(self, (seed, epoch), range(self.num_parts))

    def error(self, student: nn.Module, teacher: nn.Module, precision: torch.dtype) -> float:
        """Mean error of the student's outputs on what was held back."""
        device, totals = next(student.parameters()).device, torch.zeros(2, dtype=torch.float64)
        with torch.inference_mode(), evaluating(teacher), evaluating(student), autocast(device, precision):
            for part in distributed.shard(self.held_back):
                inputs = to_device(part, device)
                error = self.output_error(run(teacher, inputs), run(student, inputs))
                totals += torch.tensor([error.item(), batch_size(part)], dtype=torch.float64)
        distributed.all_reduce([totals])
        return (totals[0] / totals[1]).item()

    def _all(self) -> Iterator[tuple[Any, bool]]:
        """Every part, and whether it is held back."""
        parts = (part for batch in self.data for part in _parts(batch, self.part_size))
        return ((part, _is_held_back(number, self.every)) for number, part in enumerate(parts))


@dataclass(frozen=True)
class _Epoch:
    """The parts of one epoch with these `numbers`, each with views of its own."""

    lessons: Inputs
    seed: tuple[int, ...]
    numbers: range

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, part: slice) -> "_Epoch":
        return replace(self, numbers=self.numbers[part])

    def __iter__(self) -> Iterator[tuple[Any, None]]:
        lessons, chosen = self.lessons, self.numbers
        parts = (part for part, is_held_back in lessons._all() if not is_held_back)
        own = islice(parts, chosen.start, chosen.stop, chosen.step)
        for number, part in zip(chosen, own, strict=True):
            if lessons.views:
                with seeded(*self.seed, number):
                    part = tree_map_only(Tensor, _view, part)
            yield part, None


def _view(tensor: Tensor) -> Tensor:
    return random_views(tensor) if are_photos(tensor) else tensor


def _parts(batch: Batch, size: int) -> Iterator[Any]:
    """The inputs of a batch in parts of at most `size` samples; whole if they cannot be divided."""
    inputs = batch[0]
    num_parts = -(-batch_size(inputs) // size) if has_row_per_sample(inputs) else 1
    return (part for part, _ in in_parts((inputs, None), num_parts))


def _is_held_back(number: int, every: int) -> bool:
    return number % every == every - 1
