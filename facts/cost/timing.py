"""Seconds of functions and networks, and of each part of a network at a rank: its latency on this device.

Networks take turns, A B A B, so that their ratio holds on a busy machine.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import itemgetter
from statistics import median, quantiles
from typing import Annotated, Any, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.timer import timer

from facts.modules.linear_calls import copy_with, stand_in
from facts.modules.networks import HALF, autocast, evaluating, hooked, run, type_of
from facts.utils import distributed
from facts.utils.options import options
from facts.utils.progress import with_progress

LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the rank at which a part costs as much as dense
EVEN = 8  # measured ranks are multiples of it, like those that a search offers; others are slower
NETWORK = ""  # name of the network among its modules
Times = dict[int | None, float]  # seconds of a part, dense (None) and by rank


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of each turn."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """The interquartile range as a share of the median."""
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median

    def ratio(self, other: Self) -> float:
        """Ratio of these seconds to the others: the median over turns."""
        return median(own / others for own, others in zip(self.seconds, other.seconds, strict=True))


@options
class TimingPolicy:
    """Length of a measurement: `num_warmups` calls of each function, and `num_turns` of `min_seconds` (0: a call)."""

    num_warmups: Annotated[int, Field(ge=0)] = 1
    num_turns: Annotated[int, Field(ge=2)] = 7
    min_seconds: Annotated[float, Field(ge=0)] = 0.2

    def times(self, functions: Mapping[str, Callable[[], Any]]) -> dict[str, Timing]:
        """Time each function in turns, with torch's current number of threads; a GPU is synchronised."""
        for _, call in with_progress([*functions.items()] * self.num_warmups, "warming up", itemgetter(0)):
            call()
        turns = [
            {name: self._turn(call) for name, call in functions.items()}
            for _ in with_progress(range(self.num_turns), "timing")
        ]
        return {name: Timing(tuple(turn[name] for turn in turns)) for name in functions}

    def _turn(self, call: Callable[[], Any]) -> float:
        if self.min_seconds:
            many = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
            return many.blocked_autorange(min_run_time=self.min_seconds).median
        start = timer()
        call()
        return timer() - start


DEFAULT_TIMING = TimingPolicy()


def batch_seconds(
    networks: Mapping[str, nn.Module], inputs: Any, policy: TimingPolicy, precision: torch.dtype = torch.float32
) -> dict[str, Timing]:
    """Time networks, in turns, on one batch; those in half precision get it in their type, without autocast."""
    with ExitStack() as stack:
        for network in networks.values():
            stack.enter_context(evaluating(network))
            stack.enter_context(torch.cuda.device_of(next(network.parameters())))  # the one that timers wait for
        return policy.times({name: _pass(net, inputs, precision) for name, net in networks.items()})


def _pass(network: nn.Module, inputs: Any, precision: torch.dtype) -> Callable[[], None]:
    if (own := type_of(network)) in HALF:
        precision = torch.float32
        inputs = tree_map_only(Tensor, lambda tensor: tensor.to(own) if tensor.is_floating_point() else tensor, inputs)
    casting = autocast(next(network.parameters()).device, precision)

    @torch.inference_mode()
    def forward() -> None:
        with casting:
            run(network, inputs)

    return forward


def measured_ranks(full_rank: int) -> tuple[int, ...]:
    """Ranks at the `LEVELS`, rounded down to a multiple of `EVEN` if there is one; small parts may repeat some."""
    ranks = [int(level * full_rank) for level in LEVELS]
    return tuple(max(1, rank - rank % EVEN if rank >= EVEN else rank) for rank in ranks)


@dataclass
class LatencyTable:
    """Seconds of a network on one batch, and of each part within it, dense and by rank, on this device.

    The network runs with all parts (`facts.parts.Part`) dense, and with all at each of five ranks; the six take
    `num_turns` turns after a warm-up turn, so that caches and memory are as in later use. `put` gives the parts of a
    copy their ranks, with meaningless weights. Parts that are alike share their medians, and parts of one module its
    time. Nothing is measured before first use. Between measured ranks, time is linear in the number of weights. What it
    takes to merge tokens in a block is measured with one token less in each `shortening` part.
    Low-rank times are multiplied by `correction`. Raises `ValueError` if there is no batch.
    """

    model: nn.Module
    parts: Mapping[str, Any]
    put: Callable[..., None]
    inputs: Any
    precision: torch.dtype = torch.float32
    num_turns: int = 5
    shortening: Mapping[str, Any] = field(default_factory=dict)
    correction: float = field(default=1.0, init=False)

    @cached_property
    def shares(self) -> dict[str, float]:
        owners = Counter(part.owner for part in self.parts.values())
        return {name: 1 / owners[part.owner] for name, part in self.parts.items()}

    @property
    def dense(self) -> float:
        """Seconds of the whole network as it was given."""
        return self.times[NETWORK][None]

    @property
    def rest(self) -> float:
        """Seconds of the network outside the parts."""
        return self.dense - sum(self.seconds(name, None) for name in self.parts)

    def seconds(self, name: str, rank: int | None, plan: Mapping[str, int | None] | None = None) -> float:
        """Seconds of a part, dense or at a rank, in proportion to the tokens that the `plan` leaves it."""
        if part := self.shortening.get(name):
            return self.merge if rank is not None and rank < part.remaining(plan or {}) else 0.0
        part = self.parts[name]
        if plan and part.tokens:
            return self.seconds(name, rank) * part.remaining(plan) / part.tokens
        times = self.times[part.alike]
        if rank is None:
            return times[None]
        known = {part.num_weights(each): seconds for each, seconds in times.items() if each is not None}
        weights = sorted(known)
        return self.correction * float(np.interp(part.num_weights(rank), weights, [known[each] for each in weights]))

    @cached_property
    def merge(self) -> float:
        """Seconds of merging tokens in one block, beside what the fewer tokens save."""
        network = copy_with(self.model)
        parts = self.shortening.values()
        self.put(network, plan={part.name: max(part.least, part.tokens - place) for place, part in enumerate(parts, 1)})
        policy = TimingPolicy(num_turns=max(2, self.num_turns), min_seconds=0.0)
        return max(0.0, self.measured(network, policy) - self.dense) / len(self.shortening)

    def predicted(self, plan: Mapping[str, int | None]) -> float:
        """Seconds of the whole network with a plan."""
        return self.rest + sum(self.seconds(name, rank, plan) for name, rank in plan.items())

    def measured(self, other: nn.Module, timing: TimingPolicy) -> float:
        """Seconds of another network on the batch, in turns with this one; on the main process for all."""
        networks = {"dense": self.model, "other": stand_in(other)}
        times = distributed.on_main_rank(partial(batch_seconds, networks, self.inputs, timing, self.precision))
        return times["other"].ratio(times["dense"]) * self.dense

    def correct(self, plan: Mapping[str, int | None], seconds: float) -> None:
        """Scale the low-rank parts' times, at most by two, to match the network's measured `seconds` with a plan."""
        factor = (seconds - self.rest) / (self.predicted(plan) - self.rest)
        self.correction *= min(max(factor, 0.5), 2.0)

    @cached_property
    def times(self) -> dict[Any, Times]:
        """Seconds of the parts by what makes them alike, dense (None) and by rank; of the `NETWORK`, dense."""
        return distributed.on_main_rank(self._measure)

    def _measure(self) -> dict[Any, Times]:
        if self.inputs is None:
            raise ValueError("latency is measured on a batch: give calibration data or input_shape")
        levels = (None, *range(len(LEVELS)))
        turns = [{level: self._run(level) for level in levels} for _ in range(self.num_turns + 1)][1:]
        alike: dict[Any, list[str]] = defaultdict(list)
        for name, part in self.parts.items():
            alike[part.alike].append(name)
        times: dict[Any, Times] = {
            shape: {
                rank: median(turn[level][name] for turn in turns for name in names)
                for level, rank in zip(levels, (None, *self.parts[names[0]].timed_ranks), strict=True)
            }
            for shape, names in alike.items()
        }
        return times | {NETWORK: {None: median(turn[None][NETWORK] for turn in turns)}}

    def _run(self, level: int | None) -> dict[str, float]:
        """Seconds of the network and of its parts, with all of them dense (None) or at one of `LEVELS`."""
        network = copy_with(self.model)
        if level is not None:
            self.put(network, plan={name: part.timed_ranks[level] for name, part in self.parts.items()})
        modules = (NETWORK, *dict.fromkeys(part.owner for part in self.parts.values()))
        seconds = module_seconds(network, modules, self.inputs, self.precision)
        own = {name: self.shares[name] * seconds[part.owner] for name, part in self.parts.items()}
        return {NETWORK: seconds[NETWORK], **own}


@torch.inference_mode()
def module_seconds(
    network: nn.Module, names: Iterable[str], inputs: Any, precision: torch.dtype = torch.float32
) -> dict[str, float]:
    """Measure the seconds that some modules take in one forward pass, over all their calls."""
    device = next(network.parameters()).device
    modules = {name: network.get_submodule(name) for name in names}
    starts: dict[str, list[Any]] = {name: [] for name in modules}
    stops: dict[str, list[Any]] = {name: [] for name in modules}

    def note(moments: list, *_: Any) -> None:
        moments.append(_now(device))

    before, after = (
        [(module, partial(note, moments[name])) for name, module in modules.items()] for moments in (starts, stops)
    )
    own_device = torch.cuda.device_of(next(network.parameters()))  # on which events are recorded
    with hooked(after, before), evaluating(network), own_device, autocast(device, precision):
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
    if isinstance(start, float):
        return stop - start
    stop.synchronize()
    return start.elapsed_time(stop) / 1000
