"""Analyses: from a network, an estimator and held-out data to numbers that explain a result."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from typing import Any, ClassVar

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import nn

from facts.compression.prepare import Calibration
from facts.estimators import Estimator


@plain_dataclass(frozen=True, kw_only=True)
class Subject:
    """A network and the data for an estimator's factors, and other data, disjoint, to compare with.

    `held_out` is the same network on those. `estimator` and the `compressed` network are None where there are none.
    """

    calibration: Calibration
    held_out: Calibration
    estimator: Estimator | None = None
    compressed: nn.Module | None = None

    @property
    def model(self) -> nn.Module:
        return self.calibration.model

    @property
    def layers(self) -> Mapping[str, nn.Linear]:
        return self.calibration.layers


@plain_dataclass(frozen=True)
class Findings:
    """`metrics` by name, and `values`, plain lists and mappings, for plots."""

    metrics: dict[str, float] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Analysis(ABC):
    """One question to a network.

    `needs_factors` where it asks for an estimator's factors of the calibration data, `depends_on_device` where the
    answer is another one on other hardware.
    """

    needs_factors: ClassVar[bool] = False
    depends_on_device: ClassVar[bool] = False

    def check(self, model: nn.Module, estimator: Estimator | None) -> None:  # noqa: B027 - not every one has a condition
        """Whether the question can be asked. Raises an error that says what is missing, before any work."""

    @abstractmethod
    def run(self, subject: Subject) -> Findings:
        """The answer. Raises `ValueError` where the subject lacks what the question needs."""


def groups_within(layers: Mapping[str, nn.Linear], max_weights: int) -> Iterator[list[str]]:
    """The layers' names in order, in groups of at most `max_weights` weights together, or of one larger layer."""
    group: dict[str, nn.Linear] = {}
    for name, layer in layers.items():
        if group and sum(other.weight.numel() for other in group.values()) + layer.weight.numel() > max_weights:
            yield list(group)
            group = {}
        group[name] = layer
    yield list(group)
