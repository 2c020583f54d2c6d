"""What a task is."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Task(ABC):
    """Data and measure for one kind of network. `model` tells the input size and normalisation it expects."""

    num_evaluation: ClassVar[int]

    @abstractmethod
    def inspect(self) -> str:
        """What data there are, in words. Raises an `OSError` or `ValueError` where they are not as they should be."""

    @abstractmethod
    def content_key(self, model: nn.Module) -> str:
        """A hash of everything that the task's data contribute to a result."""

    @abstractmethod
    def calibration(self, model: nn.Module) -> Iterable[tuple[Any, Any]]:
        """Batches of `(inputs, targets)` to calibrate on; they can be read again and again."""

    @abstractmethod
    def sensitivity(self, model: nn.Module) -> Iterable[tuple[Any, Any]]:
        """Other batches, on which searches compare a changed network with the original."""

    @abstractmethod
    def analysis(self, model: nn.Module) -> tuple[Iterable[tuple[Any, Any]], Iterable[tuple[Any, Any]]]:
        """Disjoint parts of the evaluation data, every class alike: for the factors to analyse, and to compare with."""

    def chosen_images(self) -> dict[str, Any]:
        """Which images give the factors, and which the sensitivities; empty where that needs no telling."""
        return {}

    @abstractmethod
    def output_error(self, original: Any, changed: Any) -> Tensor:
        """How far the outputs of a changed network lie from the original ones: the sum over samples."""

    @abstractmethod
    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """The sum over samples of each one's own loss."""

    @abstractmethod
    def input_shape(self, model: nn.Module) -> tuple[int, ...]:
        """Shape of one input with its batch axis, for counting cost."""

    @abstractmethod
    def evaluate(self, model: nn.Module, precision: torch.dtype = torch.float32) -> dict[str, float]:
        """The task's figures by name, on the model's device and in the given autocast type."""
