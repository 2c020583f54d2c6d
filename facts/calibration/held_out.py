"""Division of calibration data: some samples are held out of moments, searches and training, for evaluation."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count
from operator import length_hint
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from facts.calibration.data import Batch, as_batches
from facts.cost.trace import has_row_per_sample
from facts.utils.batches import batch_size, first_of, share
from facts.utils.cache import content_key

log = logging.getLogger(__name__)

LEAST = 32  # samples, if a quarter of the data is that many


def num_held_out(num_samples: int, least: int = LEAST) -> int:
    """A tenth of the samples; at least `least`, but no more than a quarter."""
    return min(num_samples // 4, max(least, num_samples // 10))


@dataclass(frozen=True)
class Part:
    """The samples of some batches that are held out, or the others; both are spread evenly over the data.

    A `share` of the samples, in batches of `size`, is held out by sample number; if `size` is None, a share of whole
    batches. The batches have the numbers `first`, `first + step`, ...; `key` is the hash of the inputs of number 0.
    """

    batches: Iterable[Batch]
    held_out: bool
    share: Fraction
    size: int | None
    key: str
    first: int = 0
    step: int = 1

    @property
    def content_key(self) -> str | None:
        own = getattr(self.batches, "content_key", None)
        return own and content_key(own, self.held_out, str(self.share), self.size)

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in zip(count(self.first, self.step), self.batches, strict=False):
            if number == 0 and self.held_out and content_key(batch[0]) != self.key:
                log.warning(
                    "the data differ from pass to pass: what is held out in one may be seen in another. Give a loader "
                    "with a fixed order and without random augmentation, or a list of batches"
                )
            if self.size is None:
                if self._includes(number):
                    yield batch
            elif rows := [row for row in range(batch_size(batch[0])) if self._includes(number * self.size + row)]:
                is_whole = len(rows) == batch_size(batch[0])
                yield batch if is_whole else tree_map_only(Tensor, lambda tensor: tensor[rows], batch)

    def __length_hint__(self) -> int:
        return length_hint(self.batches)

    def shard(self, rank: int, size: int) -> "Part":
        """Share of process `rank`."""
        return replace(self, batches=share(self.batches, rank, size), first=rank, step=size)

    def _includes(self, number: int) -> bool:
        is_held_out = (number + 1) * self.share // 1 > number * self.share // 1
        return is_held_out == self.held_out


def division(data: Iterable[Any], model: nn.Module) -> tuple[Iterable[Batch], Iterable[Batch]]:
    """Divide the data of a network as `divide` does. Raises `ValueError` if there are none."""
    batches = as_batches(data, model)
    if batches is None or (first := first_of(batches)) is None:
        raise ValueError("the data are empty: they must yield at least one batch")
    return divide(batches, first)


def divide(batches: Iterable[Batch], first: Batch) -> tuple[Iterable[Batch], Iterable[Batch]]:
    """Divide data into samples to work with and samples that are held out, `num_held_out` of them.

    Batches are held out as a whole if the `first` cannot be divided by samples.
    """
    size, num_batches = batch_size(first[0]), length_hint(batches)
    num_samples = max(1, num_batches - 1) * size  # at least, since the last batch may be smaller
    if isinstance(getattr(batches, "data", batches), list) or not num_batches:
        sizes = [batch_size(inputs) for inputs, _ in batches]
        num_samples, num_batches = sum(sizes), len(sizes)
    tensors = [part for part in first if part is not None]
    if all(has_row_per_sample(part) and batch_size(part) == size for part in tensors):
        held_out = Part(batches, True, Fraction(num_held_out(num_samples), num_samples), size, content_key(first[0]))
    else:
        share = Fraction(num_held_out(num_batches, -(-LEAST // size)), num_batches)
        held_out = Part(batches, True, share, None, content_key(first[0]))
    return replace(held_out, held_out=False), held_out
