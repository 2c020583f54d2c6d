"""Latency of each layer of a network at a rank, measured within the network, on this device."""

import copy
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import cached_property, partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from facts.modules.forms import FORMS, Form
from facts.modules.linear_calls import replace_submodule
from facts.modules.modes import autocast, evaluating
from facts.modules.networks import run
from facts.utils import distributed

LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the rank at which a layer costs as much as dense
EVEN = 8  # measured ranks are multiples of it, like those that a search offers: others take longer
NETWORK = ""  # its name among the modules of the network
Times = dict[int | None, float]  # seconds of a layer, dense (None) and by rank


class Shape(NamedTuple):
    """Size of a layer, whether it has a bias, and the vectors `[d_in]` that it multiplies for one sample."""

    d_in: int
    d_out: int
    bias: bool
    rows: int


class LatencyTable(ABC):
    """Seconds of a network on one batch, and of each layer within it, dense and by rank.

    Between known ranks the time is linear in the number of weights, all multiplied by `correction`.
    """

    def __init__(self, layers: Mapping[str, nn.Linear], rows: Mapping[str, int], form: Form):
        self.layers, self.form = layers, form
        self.shapes = {
            name: Shape(layer.in_features, layer.out_features, layer.bias is not None, rows[name])
            for name, layer in layers.items()
        }
        self.correction = 1.0

    @property
    @abstractmethod
    def dense(self) -> float:
        """Seconds of the whole network as it was given."""

    @property
    @abstractmethod
    def times(self) -> Mapping[Shape, Times]:
        """Seconds of the layers, dense (None) and by rank."""

    @property
    def rest(self) -> float:
        """Seconds of the network outside the layers."""
        return self.dense - sum(self.seconds(name, None) for name in self.layers)

    def seconds(self, name: str, rank: int | None) -> float:
        """Seconds of one layer, dense (None) or at a rank."""
        shape = self.shapes[name]
        times = self.times[shape]
        if rank is None:
            return times[None]
        num_weights = partial(self.form.num_weights, shape.d_out, shape.d_in)
        known = {num_weights(each): seconds for each, seconds in times.items() if each is not None}
        weights = sorted(known)
        return self.correction * float(np.interp(num_weights(rank), weights, [known[each] for each in weights]))

    def predicted(self, plan: Mapping[str, int | None]) -> float:
        """Seconds of the whole network with a plan."""
        return self.rest + sum(self.seconds(name, rank) for name, rank in plan.items())


def measured_ranks(form: Form, d_out: int, d_in: int) -> list[int]:
    """The ranks of `LEVELS`, even ones where there are any; twice the same in a small layer."""
    ranks = [int(level * form.full_rank(d_out, d_in)) for level in LEVELS]
    return [max(1, rank - rank % EVEN if rank >= EVEN else rank) for rank in ranks]


class MeasuredLatency(LatencyTable):
    """Latency on this device.

    The network runs with all its layers dense, and with all at each of five ranks; the six take `num_turns` turns after
    one to warm up, so that caches and memory are as in later use. Layers of one shape with the same number of vectors
    share their medians. Nothing is measured before its first use. Raises `ValueError` if there is no batch.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Linear],
        rows: Mapping[str, int],
        inputs: Any,
        precision: torch.dtype = torch.float32,
        num_turns: int = 5,
        form: Form = FORMS["plain"],
    ):
        super().__init__(layers, rows, form)
        self.model, self.inputs, self.precision, self.num_turns = model, inputs, precision, num_turns

    @property
    def dense(self) -> float:
        return self._medians[0]

    @property
    def times(self) -> Mapping[Shape, Times]:
        return self._medians[1]

    def correct(self, plan: Mapping[str, int | None], seconds: float) -> None:
        """Scale the low-rank layers' times, by two at most, to the measured `seconds` of the network with a plan."""
        factor = (seconds - self.rest) / (self.predicted(plan) - self.rest)
        self.correction *= min(max(factor, 0.5), 2.0)

    @cached_property
    def _medians(self) -> tuple[float, dict[Shape, Times]]:
        """Median seconds of the dense network, and of its layers by shape and rank."""
        return distributed.on_main_rank(self._measure)

    def _measure(self) -> tuple[float, dict[Shape, Times]]:
        if self.inputs is None:
            raise ValueError("latency is measured on a batch: give calibration data or input_shape")
        network = copy.deepcopy(self.model)
        levels = (None, *range(len(LEVELS)))
        turns = [{level: self._run(network, level) for level in levels} for _ in range(self.num_turns + 1)][1:]
        alike: dict[Shape, list[str]] = defaultdict(list)
        for name, shape in self.shapes.items():
            alike[shape].append(name)
        times: dict[Shape, Times] = {
            shape: {
                rank: median(turn[level][name] for turn in turns for name in names)
                for level, rank in zip(levels, (None, *measured_ranks(self.form, shape.d_out, shape.d_in)), strict=True)
            }
            for shape, names in alike.items()
        }
        return median(turn[None][NETWORK] for turn in turns), times

    def _run(self, network: nn.Module, level: int | None) -> dict[str, float]:
        """Seconds of the network and of its layers, with all of them dense (None) or at one of `LEVELS`."""
        for name, layer in self.layers.items():
            ranks = measured_ranks(self.form, layer.out_features, layer.in_features)
            module = layer if level is None else self.form.stand_in(layer, ranks[level], self.precision)
            replace_submodule(network, name, module)
        return module_seconds(network, (NETWORK, *self.layers), self.inputs, self.precision)


@torch.inference_mode()
def module_seconds(
    network: nn.Module, names: Iterable[str], inputs: Any, precision: torch.dtype = torch.float32
) -> dict[str, float]:
    """Seconds that some modules take in one forward pass, each with all its calls."""
    device = next(network.parameters()).device
    starts: dict[str, list[Any]] = {name: [] for name in names}
    stops: dict[str, list[Any]] = {name: [] for name in starts}

    def note(moments: list, *_: Any) -> None:
        moments.append(_now(device))

    with ExitStack() as stack:
        for name in starts:
            module = network.get_submodule(name)
            for hook in (
                module.register_forward_pre_hook(partial(note, starts[name])),
                module.register_forward_hook(partial(note, stops[name])),
            ):
                stack.callback(hook.remove)
        stack.enter_context(evaluating(network))
        stack.enter_context(autocast(device, precision))
        run(network, inputs)
    return {name: sum(map(_between, starts[name], stops[name])) for name in starts}


def _now(device: torch.device) -> float | torch.cuda.Event:
    """This moment; on a GPU, an event after the work queued so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, stop: Any) -> float:
    """Seconds from one moment of `_now` to another."""
    if isinstance(start, float):
        return stop - start
    stop.synchronize()
    return start.elapsed_time(stop) / 1000
