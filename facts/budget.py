"""What may remain: fractions of the compressed layers' cost, given as such or as a figure of the whole network."""

import math
from collections.abc import Mapping

from facts.cost import COST_NAMES, CostName

DEFAULT_RATIO = 0.5


def all_bounds(
    ratio: float | None,
    cost: CostName,
    bounds: Mapping[CostName, float],
    limits: Mapping[CostName, float] | None = None,
) -> dict[CostName, float]:
    """The ratio, if there is one, and the further bounds together; without any of them, or `limits`, a half.

    `limits` are figures of the whole network, which bound a cost as well. Raises `ValueError` for an unknown cost, one
    that is bounded twice, and a figure out of range.
    """
    limits = limits or {}
    if ratio is None and not bounds and not limits:
        ratio = DEFAULT_RATIO
    together = dict(bounds)
    if ratio is not None:
        if cost in bounds:
            raise ValueError(f"{cost} is bounded twice, by ratio={ratio} and by bounds={dict(bounds)}: give it once")
        together[cost] = ratio
    for name, value in together.items():
        if name not in COST_NAMES:
            raise ValueError(f"cost must be one of {', '.join(COST_NAMES)}, got {name!r}")
        if not 0 < value <= 1:
            raise ValueError(f"ratio is the fraction that remains and must lie in (0, 1], got {value} for {name}")
    for name, limit in limits.items():
        if name in together:
            raise ValueError(f"{name} is bounded twice, by a ratio of {together[name]} and by {limit:g}: give it once")
        if not 0 < limit < math.inf:
            raise ValueError(f"the {name} of the whole network must be a positive number, got {limit}")
    return together


def ratio_of_layers(cost: CostName, allowed: float, whole: float, layers: float) -> float:
    """The fraction of the layers' cost that may remain where the whole network, with them, may cost `allowed`.

    Raises `ValueError` where the rest of the network alone costs as much.
    """
    rest = whole - layers
    if allowed <= rest:
        raise ValueError(
            f"{cost} of {allowed:.6g} cannot be met: of the network's {whole:.6g} only {layers:.6g} are those of the "
            f"layers to compress. Allow more than {rest:.6g}, or compress more layers"
        )
    return 1.0 if allowed >= whole else math.nextafter((allowed - rest) / layers, 0)  # never more than is allowed
