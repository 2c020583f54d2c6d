"""What an analysis is: from a network, an estimator and held-out data to figures that explain a result."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import nn

from facts.compression import moment_cache
from facts.estimators import Estimator
from facts.losses import Loss, summed_cross_entropy
from facts.memory import DEFAULT_POLICY, MemoryPolicy
from facts.moments import LayerMoments, Moment, collect_moments

Batches = Iterable[tuple[Any, Any]]


@plain_dataclass(frozen=True, kw_only=True)
class Subject:
    """What is analysed: a network, data for an estimator's factors, and others, disjoint, to compare with.

    `estimator` and the `compressed` network are None where there are none. Moments are kept in the folder `cache`.
    """

    model: nn.Module
    layers: Mapping[str, nn.Linear]
    calibration: Batches
    held_out: Batches
    loss: Loss = summed_cross_entropy
    precision: torch.dtype = torch.float32
    estimator: Estimator | None = None
    compressed: nn.Module | None = None
    memory: MemoryPolicy = DEFAULT_POLICY
    cache: Path | None = None

    def collect(
        self,
        data: Batches,
        moments: tuple[Moment, ...],
        layers: Mapping[str, nn.Linear] | None = None,
        cached: bool = True,
    ) -> dict[str, LayerMoments]:
        """Moments of some layers (default: all), where `cached` from the cache if they are there."""
        layers = self.layers if layers is None else layers
        settings: dict[str, Any] = {"loss": self.loss, "precision": self.precision}
        kept = moment_cache(self.cache, self.model, layers, data, **settings) if self.cache and cached else None
        return collect_moments(self.model, layers, data, moments, **settings, memory=self.memory, cache=kept)


@plain_dataclass(frozen=True)
class Findings:
    """`metrics` by name, and `values`, plain lists and mappings, for figures."""

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


def groups_within(layers: Mapping[str, nn.Linear], max_weights: int) -> Iterator[dict[str, nn.Linear]]:
    """The layers in order, in groups of at most `max_weights` weights together, or of one larger layer."""
    group: dict[str, nn.Linear] = {}
    for name, layer in layers.items():
        if group and sum(other.weight.numel() for other in group.values()) + layer.weight.numel() > max_weights:
            yield group
            group = {}
        group[name] = layer
    yield group
