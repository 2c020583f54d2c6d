"""CutMix: calibration images with a rectangle of another image in each (Yun et al., 2019)."""

from collections.abc import Iterable, Iterator
from dataclasses import field
from functools import cached_property
from itertools import count
from operator import length_hint
from typing import Any

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchvision.transforms import v2

from facts.calibration.data import Batch, Batches, as_batches
from facts.utils.batches import described
from facts.utils.cache import content_key
from facts.utils.options import Count, Positive
from facts.utils.random import seeded


@dataclass(frozen=True, eq=False, config=ConfigDict(extra="forbid"))
class CutMix:
    """Batches of images `[N, C, H, W]`, each with a rectangle of another one, and soft targets `[N, num_classes]`.

    `data` are images with class indices `[N]`, in any form that `facts.compress` takes. The other image is the previous
    one in the batch (for the first image, the last). A batch has one rectangle; the share of an image left outside it
    is drawn from Beta(`alpha`, `alpha`), and grows if the image's edge cuts the rectangle. Targets weight both classes
    by these shares; images without labels have no targets. `seed` and the number of a batch determine its rectangle, so
    every pass sees the same images. A later batch of one image stays unchanged. Raises `ValueError` for other data, and
    for a first batch of one image.

    Source: Yun et al., "CutMix", ICCV 2019; mixed by torchvision.
    """

    data: Any = field(repr=False)
    num_classes: Count
    alpha: Positive = 1.0
    seed: int = 0

    @property
    def content_key(self) -> str | None:
        own = self.batches.content_key
        return own and content_key("CutMix", own, self.num_classes, self.alpha, self.seed)

    def __iter__(self) -> Iterator[Batch]:
        return self._mixed(self.batches, count())

    def __length_hint__(self) -> int:
        return length_hint(self.batches)

    def shard(self, rank: int, size: int) -> Iterator[Batch]:
        """Share of process `rank`, with the rectangles that a single process would draw."""
        return self._mixed(self.batches.shard(rank, size), count(rank, size))

    @cached_property
    def batches(self) -> Batches:
        batches = as_batches(self.data, nn.Identity())  # for a model with classes, not tokens, as targets
        if batches is None:
            raise ValueError("CutMix mixes the images of data, and got none: give batches of images")
        assert isinstance(batches, Batches)
        return batches

    def _mixed(self, batches: Iterable[Batch], numbers: Iterable[int]) -> Iterator[Batch]:
        mix = v2.CutMix(alpha=self.alpha, num_classes=self.num_classes)
        for number, (inputs, labels) in zip(numbers, batches, strict=False):
            indices = self._class_indices(inputs, labels)
            if number == 0 and len(indices) == 1:
                raise ValueError(
                    "CutMix mixes the images of a batch, but the first has only one: give batches of two or more"
                )
            with seeded(self.seed, number):
                mixed, targets = mix(inputs, indices)
            yield mixed, None if labels is None else targets

    def _class_indices(self, inputs: Any, labels: Any) -> Tensor:
        """Labels of a batch, zeros if it has none. Raises `ValueError` if they are not indices for images."""
        images = tree_leaves(inputs)
        are_images = len(images) == 1 and isinstance(images[0], Tensor) and images[0].ndim == 4
        if are_images and labels is None:
            return torch.zeros(len(images[0]), dtype=torch.int64)
        are_indices = isinstance(labels, Tensor) and not (labels.is_floating_point() or labels.is_complex())
        if not are_images or not are_indices or labels.shape != images[0].shape[:1]:
            raise ValueError(
                "CutMix mixes images [N, C, H, W], alone or with class indices [N], got "
                f"{described(inputs)} with {described(labels)}"
            )
        if ((labels < 0) | (labels >= self.num_classes)).any():
            raise ValueError(
                f"labels from {labels.min()} to {labels.max()} do not fit num_classes={self.num_classes}: give the "
                "number of the network's classes"
            )
        return labels.long()
