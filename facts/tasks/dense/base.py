"""Shared parts of detection and segmentation, for networks of `facts.models.feature_network`."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
from mmengine.dataset import BaseDataset, pseudo_collate
from mmengine.evaluator import BaseMetric
from pydantic import Field
from torch import Tensor, nn

from facts.models.feature_network import Features
from facts.modules.modes import autocast
from facts.tasks.base import Task
from facts.tasks.dense.numbered_batches import Groups, NumberedBatches
from facts.utils.batches import shared
from facts.utils.cache import content_key
from facts.utils.options import Count, options
from facts.utils.processors import loader_workers
from facts.utils.random import seed_of, seeded
from facts.utils.silence import silence

Split = Literal["train", "val"]


@options
class DensePrediction(Task):
    """A task calibrated on the heads' own losses, one image at a time.

    `num_calibration` training images give the factors; searches compare on `num_sensitivity` others (paper, supplement
    on downstream tasks: 10). Analyses take `num_factors` evaluation images, and `num_held_out` others to compare with.
    Images are resized to fill `scale`, the long and the short side. `augmentation` in training is `standard`, the
    library's own for this data set, or `none`. Cost is counted for square images of `input_size`.
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

    @property
    def num_analysed(self) -> tuple[int, int]:
        return self.num_factors, self.num_held_out

    @property
    def sample_passes(self) -> float:
        return min(self.scale) * min(max(self.scale), 4 / 3 * min(self.scale)) / self.input_size**2  # photos are 4:3

    @abstractmethod
    def dataset(self, split: Split, augmented: bool = False) -> BaseDataset:
        """The library's own dataset of a split; each item holds `inputs`, an image, and its `data_samples`."""

    @abstractmethod
    def metric(self) -> BaseMetric:
        """The library's own metric."""

    @abstractmethod
    def figures(self, measured: dict[str, float]) -> dict[str, float]:
        """Rename the library's metrics to the names of this package."""

    @abstractmethod
    def targets(self, samples: list[Any]) -> dict[str, Tensor]:
        """Ground truth of the samples, as tensors with one row an image."""

    @abstractmethod
    def samples(self, targets: dict[str, Tensor]) -> list[Any]:
        """Data samples with these targets."""

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
        elsewhere = ("root", "num_workers")
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in elsewhere}
        return content_key(self.files_key, settings, _preprocessing(model))

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
        order = self._order(dataset)[: self.num_factors + self.num_held_out]
        parts = order[: self.num_factors], order[self.num_factors :]
        factors, held_out = (self._batches(model, dataset, part) for part in parts)
        return factors, held_out

    def chosen_indices(self) -> dict[str, list[int]]:
        """Training images for `sensitivity` and `calibration`, by index. Raises `ValueError` if there are too few."""
        available, needed = len(self.training_images), self.num_sensitivity + self.num_calibration
        if available < needed:
            raise ValueError(
                f"{self.root} holds {available} training images; num_sensitivity + num_calibration needs {needed}"
            )
        order = self._order(self.training_images)
        return {"sensitivity": order[: self.num_sensitivity], "calibration": order[self.num_sensitivity : needed]}

    def loss(self, outputs: Features, targets: dict[str, Tensor]) -> Tensor:
        """Σ over images of each one's own loss; in training, the joint loss of the batch times its size.

        Outside of training, the heads draw the regions that count by the same seed for every image, so its loss is the
        same in any batch.
        """
        samples = self.samples(targets)
        if outputs.heads.training:
            return len(samples) * outputs.loss(samples)
        losses = (self._own_loss(outputs.of_sample(i), sample) for i, sample in enumerate(samples))
        return sum(losses, start=outputs.maps[0].new_zeros(()))

    def _own_loss(self, outputs: Features, sample: Any) -> Tensor:
        with seeded(self.seed, device=outputs.maps[0].device):
            return outputs.loss([sample])

    def input_shape(self, model: nn.Module) -> tuple[int, ...]:
        return (1, 3, self.input_size, self.input_size)

    def evaluation(self, model: nn.Module) -> NumberedBatches:
        """The validation images one by one, each with its data sample in a list."""
        dataset = self.dataset("val")
        return self._loaded(model, dataset, range(len(dataset)), lambda samples: samples, batch_size=1)

    def evaluate(self, model: nn.Module, precision: torch.dtype = torch.float32) -> dict[str, float]:
        device = next(model.parameters()).device
        images_alone, metric = self.evaluation(model), self.metric()
        metric.dataset_meta = images_alone.groups.items.metainfo  # type: ignore[attr-defined]  # of the library's own dataset
        model.eval()
        for image, samples in shared(images_alone, "evaluation"):
            with torch.inference_mode():
                with autocast(device, precision):
                    features = model(image)
                predictions = features.predictions(samples)
            metric.process({}, [prediction.to_dict() for prediction in predictions])
        with silence():
            return self.figures(metric.evaluate(len(images_alone.groups)))

    def _order(self, dataset: BaseDataset) -> list[int]:
        return torch.randperm(len(dataset), generator=torch.Generator().manual_seed(self.seed)).tolist()

    def _batches(
        self, model: nn.Module, dataset: BaseDataset, indices: Sequence[int], seed: tuple[int, ...] = ()
    ) -> NumberedBatches:
        """Batches of images and targets."""
        return self._loaded(model, dataset, indices, self.targets, self.batch_size, seed)

    def _loaded(
        self,
        model: nn.Module,
        dataset: BaseDataset,
        indices: Sequence[int],
        truth: Callable[[list[Any]], Any],
        batch_size: int,
        seed: tuple[int, ...] = (),
    ) -> NumberedBatches:
        """Batches of images, preprocessed by the network's library, and the targets that `truth` makes from samples."""

        def prepare(items: list[Any]) -> tuple[Tensor, Any]:
            data = model.heads.data_preprocessor(pseudo_collate(items), training=truth == self.targets)
            return data["inputs"], truth(data["data_samples"])

        groups = Groups(dataset, indices, batch_size, (self.seed, *seed))
        key = content_key(self.content_key(model), list(indices), batch_size, groups.seed)
        return NumberedBatches(groups, prepare, key, loader_workers(self.num_workers), range(len(groups)))


def _preprocessing(model: nn.Module) -> list[Any]:
    """Preprocessing of images and targets by the network's library."""
    preprocessor = model.heads.data_preprocessor
    settings = {
        name: value for name, value in vars(preprocessor).items() if isinstance(value, int | float | list | tuple)
    }
    return [type(preprocessor).__name__, settings, preprocessor.mean, preprocessor.std]
