"""Latency of each layer of a network at a rank, measured within the network, on this device."""

import copy
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import cached_property, partial
from statistics import median
from typing import Any

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


class LatencyTable:
    """Seconds of a network on one batch, and of each layer within it, dense and by rank.

    The network runs with all its layers dense, and with all at each of five ranks; the six take `num_turns` turns after
    one to warm up, so that caches and memory are as in later use. Layers of one shape with the same number of vectors
    share their medians; between measured ranks the time is linear in the number of weights. Nothing is measured
    before its first use. Raises `ValueError` if there is no batch.
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
        self.model, self.layers, self.rows, self.inputs = model, layers, rows, inputs
        self.precision, self.num_turns, self.form = precision, num_turns, form
        self.correction = 1.0

    @property
    def dense(self) -> float:
        """Seconds of the whole network as it was given."""
        return self._medians[NETWORK][None]

    @property
    def rest(self) -> float:
        """Seconds of the network outside the layers."""
        return self.dense - sum(self.seconds(name, None) for name in self.layers)

    def seconds(self, name: str, rank: int | None) -> float:
        """Seconds of one layer, dense (None) or at a rank."""
        medians = self._medians[name]
        if rank is None:
            return medians[None]
        ranks = sorted(rank for rank in medians if rank is not None)
        size = self.layers[name].out_features, self.layers[name].in_features
        weights = [self.form.num_weights(*size, known) for known in ranks]
        seconds = np.interp(self.form.num_weights(*size, rank), weights, [medians[known] for known in ranks])
        return self.correction * float(seconds)

    def predicted(self, plan: Mapping[str, int | None]) -> float:
        """Seconds of the whole network with a plan."""
        return self.rest + sum(self.seconds(name, rank) for name, rank in plan.items())

    def correct(self, plan: Mapping[str, int | None], seconds: float) -> None:
        """Scale the low-rank layers' times to the measured `seconds` of the whole network with a plan.

        The factor is two at most: on a busy machine a measurement can be far off, even below the time of the other
        layers.
        """
        factor = (seconds - self.rest) / (self.predicted(plan) - self.rest)
        self.correction *= min(max(factor, 0.5), 2.0)

    @cached_property
    def _medians(self) -> dict[str, dict[int | None, float]]:
        """Median seconds of the dense network, and of its layers, dense and by rank."""
        return distributed.on_main_rank(self._measure)

    def _measure(self) -> dict[str, dict[int | None, float]]:
        if self.inputs is None:
            raise ValueError("latency is measured on a batch: give calibration data or input_shape")
        network = copy.deepcopy(self.model)
        turns = [{level: self._run(network, level) for level in (None, *LEVELS)} for _ in range(self.num_turns + 1)][1:]
        alike: dict[tuple, list[str]] = defaultdict(list)
        for name, layer in self.layers.items():
            alike[layer.in_features, layer.out_features, layer.bias is None, self.rows[name]].append(name)
        medians: dict[str, dict[int | None, float]] = {NETWORK: {None: median(turn[None][NETWORK] for turn in turns)}}
        for names in alike.values():
            shared = {
                self._rank(self.layers[names[0]], level): median(turn[level][name] for turn in turns for name in names)
                for level in (None, *LEVELS)
            }
            medians |= dict.fromkeys(names, shared)
        return medians

    def _run(self, network: nn.Module, level: float | None) -> dict[str, float]:
        """Seconds of the network and of its layers, with all of them at one level."""
        for name, layer in self.layers.items():
            rank = self._rank(layer, level)
            replace_submodule(network, name, layer if rank is None else self.form.stand_in(layer, rank, self.precision))
        return module_seconds(network, (NETWORK, *self.layers), self.inputs, self.precision)

    def _rank(self, layer: nn.Linear, level: float | None) -> int | None:
        if level is None:
            return None
        rank = int(level * self.form.full_rank(layer.out_features, layer.in_features))
        return max(1, rank - rank % EVEN if rank >= EVEN else rank)


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
