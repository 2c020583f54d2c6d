"""The interface of a task."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from facts.moments.losses import kl_divergence, summed_cross_entropy
from facts.utils.options import options


class Batches(Protocol):
    """Batches of `(inputs, targets)`. Slicing does not read the batches outside the slice."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[tuple[Any, Any]]: ...
    def __getitem__(self, part: slice) -> "Batches": ...


@dataclass(frozen=True)
class Judgement:
    """Metrics by name; for metrics that are a share of samples, also `outcomes [N]`: whether each counts."""

    metrics: dict[str, float]
    outcomes: dict[str, Tensor] = field(default_factory=dict)


@options
class Task(ABC):
    """Data and metrics for one kind of network, whose `model` determines input size and normalisation."""

    @abstractmethod
    def inspect(self) -> str:
        """Describe the data in words. Raises `OSError` or `ValueError` if any are missing or damaged."""

    @abstractmethod
    def content_key(self, model: nn.Module) -> str:
        """Hash of all data that contribute to a result."""

    @abstractmethod
    def calibration(self, model: nn.Module) -> Iterable[tuple[Any, Any]]:
        """Batches of `(inputs, targets)` to calibrate on, which can be read repeatedly."""

    @abstractmethod
    def sensitivity(self, model: nn.Module) -> Iterable[tuple[Any, Any]]:
        """Other batches, on which searches compare a changed network with the original."""

    @abstractmethod
    def analysis(self, model: nn.Module) -> tuple[Iterable[tuple[Any, Any]], Iterable[tuple[Any, Any]]]:
        """Two disjoint parts of the evaluation data, balanced by class: for the factors, and for the comparison."""

    @abstractmethod
    def training(self, model: nn.Module, epoch: int, seed: int = 0) -> Batches:
        """Batches for one epoch, the same number in each. Order and augmentation depend on `seed` and `epoch`."""

    def chosen_images(self) -> dict[str, Any]:
        """Images used for the factors and the sensitivities; empty if they need not be recorded."""
        return {}

    @abstractmethod
    def output_error(self, original: Any, changed: Any) -> Tensor:
        """Distance of a changed network's outputs from the original's, summed over samples."""

    def distillation_error(self, original: Any, changed: Any, temperature: float) -> Tensor:
        """Summed distance of a student's outputs from its teacher's. Raises `ValueError` without logits to soften."""
        if temperature != 1:
            raise ValueError(f"the outputs of {type(self).__name__} are not class logits: temperature must be 1")
        return self.output_error(original, changed)

    @abstractmethod
    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Sum of the samples' own losses."""

    @abstractmethod
    def input_shape(self, model: nn.Module) -> tuple[int, ...]:
        """Shape of one input with its batch axis, for counting cost."""

    @abstractmethod
    def evaluate(self, model: nn.Module, precision: torch.dtype = torch.float32) -> dict[str, float]:
        """Measure the task's metrics by name, on the model's device and with autocast to `precision`."""

    def judge(self, model: nn.Module, precision: torch.dtype = torch.float32) -> Judgement:
        """Measure the same metrics, with the outcomes behind them."""
        return Judgement(self.evaluate(model, precision))


@options
class ClassLogits(Task):
    """A task for networks with class logits: cross-entropy on labels, Kullback-Leibler divergence between networks."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return summed_cross_entropy(outputs, targets)

    def output_error(self, original: Tensor, changed: Tensor) -> Tensor:
        return kl_divergence(original, changed)

    def distillation_error(self, original: Tensor, changed: Tensor, temperature: float) -> Tensor:
        """KL divergence of the softened outputs, times the squared temperature, which restores the gradient's scale."""
        return temperature**2 * kl_divergence(original / temperature, changed / temperature)


def settings_of(task: Task) -> dict[str, Any]:
    """The fields that a result depends on: all but the location of the data and the number of workers."""
    return {each.name: getattr(task, each.name) for each in fields(task) if each.name not in ("root", "num_workers")}


def chosen_indices_of(task: Any) -> dict[str, list[int]]:
    """Indices of shuffled images for `sensitivity` and `calibration`. Raises `ValueError` if there are too few."""
    available, first = len(task.training_images), task.num_sensitivity
    if available < (needed := first + task.num_calibration):
        message = f"{task.root} holds {available} training images"
        raise ValueError(f"{message}; num_sensitivity + num_calibration needs {needed}")
    order = torch.randperm(available, generator=torch.Generator().manual_seed(task.seed)).tolist()
    return {"sensitivity": order[:first], "calibration": order[first:needed]}
