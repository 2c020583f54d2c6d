"""Budgets: bounds on a network's cost, as fractions of its layers' cost or as numbers for the whole network."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

from facts.calibration.prepare import Calibration
from facts.cost.count import COST_NAMES, CostName
from facts.cost.latency import LatencyTable

DEFAULT_RATIO = 0.5


@dataclass(frozen=True)
class Budget:
    """Bounds that all hold at once.

    `ratios` are fractions of the compressed layers' cost (of the whole network's, for latency); `limits` are costs of
    the whole network, latency in seconds.
    """

    ratios: dict[CostName, float]
    limits: dict[CostName, float]

    @classmethod
    def of(
        cls,
        ratio: float | None = None,
        cost: CostName = "flops",
        bounds: Mapping[CostName, float] | None = None,
        *,
        flops: float | None = None,
        params: float | None = None,
        latency_ms: float | None = None,
    ) -> "Budget":
        """Make a budget from the arguments of `facts.compress`; by default, half of the cost.

        Raises `ValueError` for an unknown cost, a cost that is bounded twice, and a number out of range.
        """
        given: dict[CostName, float | None]
        given = {"flops": flops, "params": params, "latency": None if latency_ms is None else latency_ms / 1000}
        limits = {name: value for name, value in given.items() if value is not None}
        ratios = dict(bounds or {})
        if ratio is None and not ratios and not limits:
            ratio = DEFAULT_RATIO
        if ratio is not None:
            if cost in ratios:
                raise ValueError(f"{cost} is bounded twice, by ratio={ratio} and by bounds={ratios}: give it once")
            ratios[cost] = ratio
        for name, value in ratios.items():
            if name not in COST_NAMES:
                raise ValueError(f"cost must be one of {', '.join(COST_NAMES)}, got {name!r}")
            if not _is_number(value) or not 0 < value <= 1:
                raise ValueError(f"ratio is the fraction that remains and must lie in (0, 1], got {value!r} for {name}")
        for name, limit in limits.items():
            if name in ratios:
                raise ValueError(
                    f"{name} is bounded twice, by a ratio of {ratios[name]} and by {limit:g}: give it once"
                )
            if not _is_number(limit) or not 0 < limit < math.inf:
                raise ValueError(f"the {name} of the whole network must be a positive number, got {limit}")
        return cls(ratios, limits)

    @property
    def bounds_latency(self) -> bool:
        return "latency" in self.ratios or "latency" in self.limits

    def bounds(self, calibration: Calibration, table: LatencyTable) -> dict[CostName, float]:
        """Convert all bounds to fractions of the layers' cost; a bound on latency is one of the whole network already.

        Raises `ValueError` for a limit that cannot be met, and for a limit of FLOPs if they are not known.
        """
        layers, dense = calibration.layers, calibration.cost
        found = dict(self.ratios)
        for name, limit in self.limits.items():
            if name == "latency":
                found[name] = min(1.0, limit / table.dense)
            elif name == "params":
                own = sum(layer.weight.numel() for layer in layers.values())
                found[name] = ratio_of_layers(name, limit, dense.params, own)
            elif dense.flops is None:
                raise ValueError("the network's FLOPs are not known: give input_shape, or a ratio instead of flops")
            else:
                own = sum(2 * calibration.rows[layer] * layers[layer].weight.numel() for layer in layers)
                found[name] = ratio_of_layers(name, limit, dense.flops, own)
        return found


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def ratio_of_layers(cost: CostName, allowed: float, whole: float, layers: float) -> float:
    """Fraction of the layers' cost that may remain if the whole network, layers included, may cost `allowed`.

    Raises `ValueError` if the rest of the network alone costs that much.
    """
    rest = whole - layers
    if allowed <= rest:
        raise ValueError(
            f"{cost} of {allowed:.6g} cannot be met: of the network's {whole:.6g} only {layers:.6g} are those of the "
            f"layers to compress. Allow more than {rest:.6g}, or compress more layers"
        )
    return 1.0 if allowed >= whole else math.nextafter((allowed - rest) / layers, 0)  # never more than is allowed
