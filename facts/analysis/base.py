"""Analyses: from a network, an estimator and held-out data to numbers that explain a result."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from facts.calibration.prepared_model import PreparedModel
from facts.estimators import Estimator
from facts.modules.networks import noise
from facts.utils.options import options


@dataclass(frozen=True, kw_only=True)
class AnalysisInputs:
    """A network with the data for an estimator's factors, and `held_out`, the same network with disjoint data.

    `compressed` is the network that was made of it, if there is one.
    """

    prepared: PreparedModel
    held_out: PreparedModel
    estimator: Estimator | None = None
    compressed: nn.Module | None = None

    def noise(self, batch_size: int) -> Tensor:
        """Make a batch for timing, shaped like the held-out data."""
        inputs, _ = next(iter(self.held_out.data or ()))
        return noise(self.prepared.model, (batch_size, *inputs.shape[1:]), self.prepared.device)


@dataclass(frozen=True)
class Findings:
    """`metrics` by name, `values`, plain lists and mappings, for plots, and `outcomes` as those of a task."""

    metrics: dict[str, float] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    outcomes: dict[str, Tensor] = field(default_factory=dict)


@options
class Analysis(ABC):
    """A measurement of one network."""

    needs_factors: ClassVar[bool] = False
    """Whether it needs an estimator's factors of the calibration data."""
    reads_layers: ClassVar[bool] = True
    """Whether it looks into layers, not only at the finished network."""
    depends_on_device: ClassVar[bool] = False
    """Whether its values depend on the hardware."""

    def check(self, model: nn.Module, estimator: Estimator | None) -> None:  # noqa: B027 - not every analysis has a condition
        """Check, before any work, that the analysis can run. Raises an error that says what is missing."""

    @abstractmethod
    def run(self, inputs: AnalysisInputs) -> Findings:
        """Measure a network. Raises `ValueError` if the inputs lack something that it needs."""
