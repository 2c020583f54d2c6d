"""Shared parts of detection and segmentation, for networks of `facts.models.feature_network`."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
from mmengine.dataset import BaseDataset, pseudo_collate
from mmengine.evaluator import BaseMetric
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import Dataset

from facts.models.feature_network import Features
from facts.tasks.base import Evaluation, NumberedBatches, Task, chosen_indices_of, pass_over, settings_of
from facts.utils.cache import content_key
from facts.utils.options import Count, options
from facts.utils.processors import loader_workers
from facts.utils.random import seed_of, seeded
from facts.utils.silence import silence

Split = Literal["train", "val"]


@options
class DensePrediction(Task):
    """A task calibrated on the heads' own losses, one image at a time.

    The factors come from `num_calibration` training images; searches compare outputs on `num_sensitivity` others
    (paper, supplement on downstream tasks: 10). Analyses use `num_factors` evaluation images for the factors, and
    `num_held_out` others for the comparison. Images are resized to fit `scale`, the long and the short side.
    Training uses the library's `standard` augmentation, or `none`. Cost is counted for square images of `input_size`.
    """

    root: str
    num_calibration: Count
    num_sensitivity: Count = 10
    num_factors: Count = 32
    num_held_out: Count = 32
    batch_size: Count
    scale: tuple[Count, Count]
    augmentation: Literal["standard", "none"] = "standard"
    input_size: Count = 512
    num_workers: Annotated[int, Field(ge=0)] | None = None
    seed: int = 0

    @abstractmethod
    def dataset(self, split: Split, augmented: bool = False) -> BaseDataset:
        """The library's own dataset of a split; each item holds `inputs`, an image, and its `data_samples`."""

    @abstractmethod
    def metric(self) -> BaseMetric:
        """The library's own metric."""

    @abstractmethod
    def renamed(self, measured: dict[str, float]) -> dict[str, float]:
        """Rename the library's metrics to the names of this package."""

    @abstractmethod
    def targets(self, samples: list[Any]) -> dict[str, Tensor]:
        """Ground truth of the samples, as tensors with one row per image."""

    @abstractmethod
    def samples(self, targets: dict[str, Tensor]) -> list[Any]:
        """Build data samples from these targets."""

    @property
    @abstractmethod
    def files_key(self) -> str:
        """Hash of the files that the results depend on."""

    @cached_property
    def training_images(self) -> BaseDataset:
        return self.dataset("train")

    def inspect(self) -> str:
        self.chosen_indices()
        training, validation = len(self.training_images), len(self.dataset("val"))
        return f"{training:,} training and {validation:,} validation images at {self.root}"

    def content_key(self, model: nn.Module) -> str:
        return content_key(self.files_key, settings_of(self), _preprocessing(model))

    def calibration(self, model: nn.Module) -> NumberedBatches:
        return self._batches(model, self.training_images, self.chosen_indices()["calibration"])

    def sensitivity(self, model: nn.Module) -> NumberedBatches:
        return self._batches(model, self.training_images, self.chosen_indices()["sensitivity"])

    def training(self, model: nn.Module, epoch: int, seed: int = 0) -> NumberedBatches:
        dataset = self.dataset("train", augmented=True)
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed_of(seed, epoch)))
        whole = len(dataset) // self.batch_size * self.batch_size  # a smaller last batch is left out
        return self._batches(model, dataset, order[:whole].tolist(), (seed, epoch))

    def analysis(self, model: nn.Module) -> tuple[NumberedBatches, NumberedBatches]:
        dataset = self.dataset("val")
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(self.seed)).tolist()
        parts = order[: self.num_factors], order[self.num_factors :][: self.num_held_out]
        factors, held_out = (self._batches(model, dataset, part) for part in parts)
        return factors, held_out

    def chosen_indices(self) -> dict[str, list[int]]:
        """Training images for `sensitivity` and `calibration`, by index. Raises `ValueError` if there are too few."""
        return chosen_indices_of(self)

    def loss(self, outputs: Features, targets: dict[str, Tensor]) -> Tensor:
        """Sum of the images' own losses; in training, the joint loss of the batch times its size.

        Outside training, the heads sample regions with one seed for every image: its loss is the same in any batch.
        """
        samples = self.samples(targets)
        if outputs.heads.training:
            return len(samples) * outputs.loss(samples)
        total = outputs.maps[0].new_zeros(())
        for number, sample in enumerate(samples):
            with seeded(self.seed, device=total.device):
                total = total + outputs.of_sample(number).loss([sample])
        return total

    def input_shape(self, model: nn.Module) -> tuple[int, ...]:
        return (1, 3, self.input_size, self.input_size)

    def evaluation(self, model: nn.Module) -> NumberedBatches:
        """The validation images one by one, each with its data sample in a list."""
        dataset = self.dataset("val")
        return self._batches(model, dataset, range(len(dataset)), as_samples=True)

    def evaluate(
        self, model: nn.Module, precision: torch.dtype = torch.float32, original: nn.Module | None = None
    ) -> Evaluation:
        dataset, metric = self.dataset("val"), self.metric()
        metric.dataset_meta = dataset.metainfo

        def add(features: Features, samples: list[Any]) -> None:
            metric.process({}, [prediction.to_dict() for prediction in features.predictions(samples)])

        pass_over(self.evaluation(model), model, add, precision)
        with silence():
            return Evaluation(self.renamed(metric.evaluate(len(dataset))))

    def _batches(
        self, model: nn.Module, dataset: BaseDataset, indices: Sequence[int], seed: tuple = (), as_samples: bool = False
    ) -> NumberedBatches:
        """Batches of images, preprocessed by the network's library, with targets; or single images with samples."""

        def finish(items: list[Any]) -> tuple[Tensor, Any]:
            data = model.heads.data_preprocessor(pseudo_collate(items), training=not as_samples)
            samples = data["data_samples"]
            return data["inputs"], samples if as_samples else self.targets(samples)

        groups = Groups(dataset, indices, 1 if as_samples else self.batch_size, (self.seed, *seed))
        key = content_key(self.content_key(model), list(indices), groups.batch_size, groups.seed)
        return NumberedBatches(groups, finish, key, loader_workers(self.num_workers), range(len(groups)))


@dataclass(frozen=True)
class Groups(Dataset):
    """Items of a dataset, grouped into batches. Random transforms depend on `seed` and the batch number."""

    items: Dataset
    indices: Sequence[int]
    batch_size: int
    seed: tuple[Any, ...]

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __getitem__(self, number: int) -> list[Any]:
        start = number * self.batch_size
        with seeded(*self.seed, number):
            return [self.items[index] for index in self.indices[start : start + self.batch_size]]


def _preprocessing(model: nn.Module) -> list[Any]:
    """Settings of the network's library for preprocessing images and targets."""
    preprocessor, plain = model.heads.data_preprocessor, int | float | list | tuple
    settings = {name: value for name, value in vars(preprocessor).items() if isinstance(value, plain)}
    return [type(preprocessor).__name__, settings, preprocessor.mean, preprocessor.std]
