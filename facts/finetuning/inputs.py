"""Training data from inputs without labels: the targets are the original's outputs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from facts.calibration.data import Batch
from facts.calibration.distance import distance
from facts.moments.batch import at_least_float32
from facts.moments.losses import OutputError
from facts.utils.batches import batch_size, has_row_per_sample, in_parts
from facts.utils.cache import calibration_key, content_key, name_of
from facts.utils.numerics import seeded

SMALLEST_AREA = 0.5  # fraction of the image that a random crop keeps at least
ASPECT = 4 / 3  # largest ratio of its sides, before it is clipped to the image


@dataclass(frozen=True)
class Survey:
    """Layout found by the first reading: parts of up to `part_size` samples, of which every `every`-th is `held_back`.

    `keys` are the hashes of the first part and of the held-back ones, by number.
    """

    part_size: int
    every: int
    held_back: list[Any]
    keys: dict[int, str]
    num_training_parts: int
    num_samples: int


@dataclass(frozen=True)
class Inputs:
    """Inputs of batches, in parts of at most `part_size` samples; a fraction of about `held_back` is for validation.

    The parts come in the order of the data, the same in every epoch. `views` randomly crops and flips photos.
    """

    data: Iterable[Batch]
    output_error: OutputError
    part_size: int
    held_back: float
    views: bool

    @cached_property
    def survey(self) -> Survey:
        """Read the data once. Raises `ValueError` if they cannot be divided into parts to train on and to hold back."""
        every, size = max(2, round(1 / self.held_back)), self.part_size
        first = list(islice(self._parts(size), 2))
        if len(first) == 1 and has_row_per_sample(first[0]):  # one part to learn from, and one to judge by
            size = -(-batch_size(first[0]) // 2)
        sizes, held, keys, last = [], [], {}, None
        for number, last in enumerate(self._parts(size)):
            sizes.append(batch_size(last))
            if number % every == every - 1:
                held.append(tree_map_only(Tensor, torch.clone, last))  # a view would keep the whole batch
            if number == 0 or number % every == every - 1:
                keys[number] = content_key(last)
        if len(sizes) < 2:
            raise ValueError("recovery needs at least two samples: some to learn from, others to choose the best epoch")
        if not held:
            every, held = len(sizes), [tree_map_only(Tensor, torch.clone, last)]
            keys[every - 1] = content_key(last)
        return Survey(size, every, held, keys, len(sizes) - len(held), sum(sizes) - sum(map(batch_size, held)))

    def content_key(self, model: nn.Module) -> str:
        error = name_of(self.output_error, "output_error")
        return content_key(calibration_key(self.data), error, self.part_size, self.held_back, self.views)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        raise NotImplementedError("inputs without labels have no loss of their own")

    def distillation_error(self, original: Any, changed: Any, temperature: float) -> Tensor:
        return self.output_error(original, changed)

    def training(self, model: nn.Module, epoch: int, seed: int = 0) -> "Epoch":
        return Epoch(self, (seed, epoch), range(self.survey.num_training_parts))

    def error(self, student: nn.Module, teacher: nn.Module, precision: torch.dtype) -> float:
        """Mean error of the student's outputs on the held-back parts."""
        held_back = [(part, None) for part in self.survey.held_back]
        found = distance(teacher, student, held_back, self.output_error, precision)
        assert found is not None
        return found.mean

    def parts_to_train_on(self) -> Iterator[Any]:
        """Yield the parts that are not held back. Raises `ValueError` if the data differ from what the survey read."""
        for number, part in enumerate(self._parts(self.survey.part_size)):
            is_held_back = number % self.survey.every == self.survey.every - 1
            if (number == 0 or is_held_back) and content_key(part) != self.survey.keys.get(number):
                raise ValueError(
                    "the data differ from pass to pass, so nothing can be held back: give a loader without its own "
                    "generator and without random augmentation (`views` does that), or a list of batches"
                )
            if not is_held_back:
                yield part

    def _parts(self, size: int) -> Iterator[Any]:
        """Yield each batch's inputs in parts of at most `size` samples, or whole if they cannot be divided."""
        for inputs, _ in self.data:
            num_parts = -(-batch_size(inputs) // size) if has_row_per_sample(inputs) else 1
            yield from (part for part, _ in in_parts((inputs, None), num_parts))


@dataclass(frozen=True)
class Epoch:
    """The parts of one epoch with these `numbers`, each with its own views; the others are read and skipped."""

    inputs: Inputs
    seed: tuple[int, ...]
    numbers: range

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, part: slice) -> "Epoch":
        return replace(self, numbers=self.numbers[part])

    def __iter__(self) -> Iterator[tuple[Any, None]]:
        chosen = self.numbers
        own = islice(self.inputs.parts_to_train_on(), chosen.start, chosen.stop, chosen.step)
        for number, part in zip(chosen, own, strict=True):
            if self.inputs.views and _is_one_photo_each(part):
                with seeded(*self.seed, number):
                    part = tree_map_only(Tensor, random_views, part)
            yield part, None


def _is_one_photo_each(part: Any) -> bool:
    """Check that a part is colour images `[N, 3, H, W]` and nothing else that would need the same crop."""
    tensors = [leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor)]
    return len(tensors) == 1 and tensors[0].ndim == 4 and tensors[0].is_floating_point() and tensors[0].shape[1] == 3


def random_views(images: Tensor) -> Tensor:
    """Crop each image `[N, C, H, W]`, flip it with probability one half, and resize it bilinearly to the same size.

    Both networks see the same view, so no label can be wrong.
    """
    exact = at_least_float32(images)  # half precision has too few bits for positions
    draws = torch.rand(5, len(exact), dtype=exact.dtype, device=exact.device)
    area, aspect = 1 - (1 - SMALLEST_AREA) * draws[0], ASPECT ** (2 * draws[1] - 1)
    width, height = ((area * by).sqrt().clamp(max=1) for by in (aspect, 1 / aspect))
    flip = 1 - 2 * (draws[2] < 0.5).to(exact)
    right, down = (1 - width) * (2 * draws[3] - 1), (1 - height) * (2 * draws[4] - 1)
    zero = torch.zeros_like(width)
    matrices = torch.stack([torch.stack([flip * width, zero, right], 1), torch.stack([zero, height, down], 1)], 1)
    grid = F.affine_grid(matrices, list(exact.shape), align_corners=False)
    return F.grid_sample(exact, grid, padding_mode="border", align_corners=False).to(images)
