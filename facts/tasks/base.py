"""The interface of a task, and what tasks share: indices, workers, and passes over the evaluation data."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from facts.modules.linear_calls import stand_in
from facts.modules.networks import autocast, evaluating, run
from facts.moments.losses import kl_divergence, summed_cross_entropy
from facts.utils.batches import Batches, to_device
from facts.utils.distributed import loader_workers
from facts.utils.numerics import shuffled
from facts.utils.options import options
from facts.utils.progress import with_progress

T = TypeVar("T")


class Evaluation(dict[str, float]):
    """Metrics by name; for those that are a share of samples, also `outcomes [N]`: whether each sample counts."""

    def __init__(self, metrics: Mapping[str, float], outcomes: Mapping[str, Tensor] | None = None):
        super().__init__(metrics)
        self.outcomes = dict(outcomes or {})


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

    @abstractmethod
    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Sum of the samples' own losses."""

    @abstractmethod
    def input_shape(self, model: nn.Module) -> tuple[int, ...]:
        """Shape of one input with its batch axis, for counting cost."""

    @abstractmethod
    def evaluate(
        self, model: nn.Module, precision: torch.dtype = torch.float32, original: nn.Module | None = None
    ) -> Evaluation:
        """Measure the task's metrics, on the model's device and with autocast to `precision`.

        A task may compare the network with the `original` too.
        """


@options
class ClassLogits(Task):
    """A task for networks with class logits: cross-entropy on labels, Kullback-Leibler divergence between networks."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return summed_cross_entropy(outputs, targets)

    def output_error(self, original: Tensor, changed: Tensor) -> Tensor:
        return kl_divergence(original, changed)


def fields_of(task: Task) -> dict[str, Any]:
    """The fields that a result depends on: all but the location of the data and the number of workers."""
    return {each.name: getattr(task, each.name) for each in fields(task) if each.name not in ("root", "num_workers")}


def chosen_indices_of(task: Any) -> dict[str, list[int]]:
    """Indices of shuffled images for `sensitivity` and `calibration`. Raises `ValueError` if there are too few."""
    available, first = len(task.training_images), task.num_sensitivity
    if available < (needed := first + task.num_calibration):
        message = f"{task.root} holds {available} training images"
        raise ValueError(f"{message}; num_sensitivity + num_calibration needs {needed}")
    order = shuffled(available, task.seed).tolist()
    return {"sensitivity": order[:first], "calibration": order[first:needed]}


def pass_over(
    batches: Iterable[Any], model: nn.Module, measure: Callable[[Any, Any], T], precision: torch.dtype = torch.float32
) -> list[T]:
    """Call `measure(outputs, targets)` for each batch, in evaluation mode on the model's device; shows progress.

    A batch of inputs alone has targets of None.
    """
    model = stand_in(model)  # modules may keep what they compute, which inference mode makes useless for training
    device, found = next(model.parameters()).device, []
    with evaluating(model), torch.inference_mode(), autocast(device, precision):
        for batch in with_progress(batches, "evaluation"):
            inputs, targets = to_device(batch if isinstance(batch, tuple | list) else (batch, None), device)
            found.append(measure(run(model, inputs), targets))
    return found


def by_workers(wanted: int | None, pin_memory: bool = False) -> dict[str, Any]:
    """Options of a loader whose workers persist, since searches read the same batches repeatedly."""
    num_workers, pin_memory = loader_workers(wanted), pin_memory and torch.cuda.is_available()
    return {"num_workers": num_workers, "persistent_workers": num_workers > 0, "pin_memory": pin_memory}
