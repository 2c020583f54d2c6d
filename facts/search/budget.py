"""Budgets: limits on a network's cost or on its outputs' error."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Self

from facts.calibration.prepared_model import PreparedModel
from facts.cost.count import COST_NAMES, CostName
from facts.cost.timing import LatencyTable
from facts.utils.options import meant

DEFAULT_RATIO = 0.5


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits that must all hold; `facts.compress` adds its `ratio` and `bounds` to them.

    `flops` and `params` limit the cost of the whole network for one sample; `latency_ms` limits its time for one batch
    of the calibration data on this machine. `ratios` are fractions of the compressed layers' cost that may remain (for
    latency, of the whole network's time).

    `error` replaces all other limits: the result is the smallest network whose outputs, on held-out samples used for
    nothing else, are within this mean error of the original's. Raises `ValueError` for values out of range and for a
    cost that is bounded twice.
    """

    flops: float | None = None
    params: float | None = None
    latency_ms: float | None = None
    error: float | None = None
    ratios: Mapping[CostName, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for cost, ratio in self.ratios.items():
            if cost not in COST_NAMES:
                raise ValueError(f"cost must be one of {', '.join(COST_NAMES)}, got {cost!r}")
            if not _is_number(ratio) or not 0 < ratio <= 1:
                wrong = f"must lie in (0, 1], got {ratio!r} for {cost}{meant(ratio)}"
                raise ValueError(f"ratio is the fraction that remains and {wrong}")
        for name in ("flops", "params", "latency_ms", "error"):
            value = getattr(self, name)
            if value is not None and (not _is_number(value) or not 0 < value < math.inf):
                raise ValueError(f"the {name} of a budget must be a positive number, got {value!r}")
        if twice := self.ratios.keys() & self.limits.keys():
            raise ValueError(f"{', '.join(twice)} is bounded twice, by a ratio and by a limit: give one of them")
        if self.error is not None and (self.ratios or self.limits):
            raise ValueError("a bound on the error replaces all others: leave out ratios and limits")

    @classmethod
    def of(
        cls, ratio: float | None = None, cost: CostName = "flops", bounds: Mapping[CostName, float] | None = None
    ) -> Self:
        """Make a budget of ratios only; by default, half of the cost."""
        return cls().with_ratios(ratio, cost, bounds)

    def with_ratios(
        self, ratio: float | None, cost: CostName = "flops", bounds: Mapping[CostName, float] | None = None
    ) -> Self:
        """Add a `ratio` of one cost, and `bounds` of others; half of the cost if nothing is bounded at all."""
        ratios = {**self.ratios, **(bounds or {})}
        if ratio is None and not (ratios or self.limits or self.error):
            ratio = DEFAULT_RATIO
        if ratio is not None:
            if cost in ratios:
                raise ValueError(f"{cost} is bounded twice, by ratio={ratio} and by {ratios[cost]}: give one of them")
            ratios[cost] = ratio
        return replace(self, ratios=ratios)

    @property
    def limits(self) -> dict[CostName, float]:
        """Limits on the whole network's cost, latency in seconds."""
        latency = None if self.latency_ms is None else self.latency_ms / 1000
        given = zip(COST_NAMES, (self.flops, self.params, latency), strict=True)
        return {name: limit for name, limit in given if limit is not None}

    @property
    def costs(self) -> set[CostName]:
        """The costs that are bounded."""
        return {*self.ratios, *self.limits}

    def bounds(self, prepared: PreparedModel, table: LatencyTable) -> dict[CostName, float]:
        """Convert all limits to fractions of the layers' cost, or of the whole network's time.

        Raises `ValueError` for a limit that cannot be met, and for a limit on FLOPs if they are unknown.
        """
        found = dict(self.ratios)
        for name, limit in self.limits.items():
            if name == "latency":
                found[name] = limit / table.dense
                continue
            whole = getattr(prepared.cost, name)
            if whole is None:
                raise ValueError(
                    "the network's FLOPs are unknown: give calibration data, facts.prepare(model, input_shape=...), or "
                    "a ratio instead of flops"
                )
            parts = prepared.parts.values()
            layers = sum(part.flops(None, {}) if name == "flops" else part.num_weights(None) for part in parts)
            rest = whole - layers
            if limit <= rest:
                raise ValueError(
                    f"{name} of {limit:.6g} cannot be met: of the network's {whole:.6g}, only {layers:.6g} belong to "
                    f"the layers to compress. Allow more than {rest:.6g}, or compress more layers"
                )
            # Rounded down: never more than is allowed.
            found[name] = 1.0 if limit >= whole else math.nextafter((limit - rest) / layers, 0)
        return found


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
