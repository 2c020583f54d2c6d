"""Latency on another device, predicted from what was measured there.

Measured layers keep their times. Those of layers of other sizes come from a linear model with non-negative
coefficients: seconds for each multiply-accumulate, for each value of the weights and of the tensors before, between and
after the products, and for each product. The errors of both are in `results/benchmarks/*/device_times.md`.
"""

import logging
from collections.abc import Mapping
from functools import cached_property

import numpy as np
import scipy

from facts.cost.device_times import DeviceTimes
from facts.cost.latency import LatencyTable, Shape, TimedPart, Times, measured_ranks
from facts.modules.forms import FORMS, Form

MOST_INSIDE = 1.1  # most of the network's time that its layers may seem to take: each has its own median

log = logging.getLogger(__name__)


class PredictedLatency(LatencyTable):
    """Latency of a network on the device of `measured`, for a batch of the size measured there.

    Raises `ValueError` for units, and if the measured layers take longer than the whole network.
    """

    def __init__(self, measured: DeviceTimes, parts: Mapping[str, TimedPart]):
        if unknown := [name for name, part in parts.items() if not isinstance(part.shape, Shape)]:
            raise ValueError(
                f'device times are for linear layers, but {unknown[0]} is a unit: use parts="layers", or bound flops'
            )
        self.parts, self.form = parts, FORMS[measured.form]
        self.measured, self.device, self.batch_size = measured, measured.device, measured.batch_size
        known = measured.times
        inside = sum(known[part.shape][None] for part in parts.values() if part.shape in known)
        if inside > MOST_INSIDE * self.dense:
            raise ValueError(
                f"the device times of {self.device} cannot be right: of the network's {1000 * self.dense:.4g} ms, its "
                f"layers alone take {1000 * inside:.4g}. Measure again on the device"
            )

    @property
    def dense(self) -> float:
        return self.measured.dense

    @cached_property
    def times(self) -> Mapping[Shape, Times]:
        known = self.measured.times
        shapes = {name: part.shape for name, part in self.parts.items() if isinstance(part.shape, Shape)}
        others = {name: shape for name, shape in shapes.items() if shape not in known}
        if others:
            model = LinearModel(self.form, known)
            log.warning("not measured on %s, so predicted by size: %s", self.device, ", ".join(others))
            known |= {shape: model.times(shape) for shape in others.values()}
        return known


class LinearModel:
    """Seconds as a linear function of a layer's work and traffic, fitted by least squares of relative errors."""

    def __init__(self, form: Form, times: Mapping[Shape, Times]):
        self.form = form
        seconds = np.array([each for known in times.values() for each in known.values()])
        work = np.array([self._work(shape, rank) for shape, known in times.items() for rank in known])
        self.coefficients, _ = scipy.optimize.nnls(work / seconds[:, None], np.ones(len(seconds)))

    def seconds(self, shape: Shape, rank: int | None) -> float:
        return float(self._work(shape, rank) @ self.coefficients)

    def times(self, shape: Shape) -> Times:
        """Seconds of a layer, dense and at the ranks that would be measured."""
        ranks = None, *measured_ranks(self.form.full_rank(shape.d_out, shape.d_in))
        return {rank: self.seconds(shape, rank) for rank in ranks}

    def _work(self, shape: Shape, rank: int | None) -> np.ndarray:
        d_in, d_out, _, rows = shape
        weights = d_in * d_out if rank is None else self.form.num_weights(d_out, d_in, rank)
        between, products = (0, 1) if rank is None else (rows * rank, 2)
        return np.array([rows * weights, weights, rows * d_in, rows * d_out, between, products], dtype=float)
