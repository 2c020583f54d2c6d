"""Timing of functions and networks that take turns, A B A B, so that their ratio holds on a busy machine."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Self

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.timer import timer

from facts.modules.networks import autocast, evaluating, run
from facts.utils.options import Positive, options
from facts.utils.progress import with_progress

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of each turn."""

    seconds: tuple[Positive, ...]

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
    """Length of a measurement: `num_warmups` calls of each function, then `min_seconds` in each of `num_turns`.

    With 0 seconds, a turn is one call.
    """

    num_warmups: Annotated[int, Field(ge=0)] = 1
    num_turns: Annotated[int, Field(ge=2)] = 7
    min_seconds: Annotated[float, Field(ge=0)] = 0.2

    def times(self, functions: Mapping[str, Callable[[], Any]]) -> dict[str, Timing]:
        """Time each function in turns, with torch's current number of threads; a GPU is synchronised."""
        for call in with_progress([*functions.values()] * self.num_warmups, "warming up"):
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


@dataclass(frozen=True)
class Speed:
    """Samples per second in batches, with `spread`, the relative interquartile range; seconds for a single sample.

    `load` is the seconds to load the network from a file, already in the page cache, to its device. `memory` is the
    peak in bytes for a batch, network included; None on a CPU. Both are None for a network in a format that files
    cannot hold.
    """

    throughput: float
    spread: float
    latency: float
    load: float | None
    memory: int | None


def speeds(
    networks: Mapping[str, nn.Module],
    batch: Tensor,
    policy: TimingPolicy,
    precision: torch.dtype = torch.float32,
    compiled: bool = False,
) -> dict[str, Speed]:
    """Measure networks, in turns, on one batch `[N, ...]` and on its first sample.

    Networks in half precision get the batch in their type, without autocast to `precision`.
    """
    runs: dict[str, Any] = dict(networks)
    if compiled:
        runs = {name: torch.compile(network, dynamic=False) for name, network in networks.items()}
    whole, single = (batch_seconds(runs, inputs, policy, precision) for inputs in (batch, batch[:1]))
    memory = {name: _memory(run, batch, precision) for name, run in runs.items()}
    load = _load_seconds({name: network for name, network in networks.items() if _is_plain(network)}, policy)
    return {
        name: Speed(
            len(batch) / whole[name].median, whole[name].spread, single[name].median, load.get(name), memory[name]
        )
        for name in networks
    }


def batch_seconds(
    networks: Mapping[str, nn.Module], inputs: Any, policy: TimingPolicy, precision: torch.dtype = torch.float32
) -> dict[str, Timing]:
    with ExitStack() as stack:
        for network in networks.values():
            stack.enter_context(evaluating(network))
            stack.enter_context(torch.cuda.device_of(next(network.parameters())))  # the one that timers wait for
        calls = {name: partial(_forward, net, _as_in(net, inputs), precision) for name, net in networks.items()}
        return policy.times(calls)


def _as_in(network: nn.Module, inputs: Any) -> Any:
    """Return the inputs, with floating-point tensors in the type of a network in half precision."""
    own = next(network.parameters()).dtype
    if own not in HALF:
        return inputs
    return tree_map_only(Tensor, lambda tensor: tensor.to(own) if tensor.is_floating_point() else tensor, inputs)


@torch.inference_mode()
def _forward(network: nn.Module, inputs: Any, precision: torch.dtype) -> None:
    first = next(network.parameters())
    with autocast(first.device, torch.float32 if first.dtype in HALF else precision):
        run(network, inputs)


def _is_plain(network: nn.Module) -> bool:
    """Check that all parameters are plain tensors, as files hold them; semi-structured ones have their own class."""
    return all(type(parameter.data) is Tensor for parameter in network.parameters())


def _load_seconds(networks: Mapping[str, nn.Module], policy: TimingPolicy) -> dict[str, float]:
    with TemporaryDirectory() as folder:
        loads = {}
        for name, network in networks.items():
            torch.save(network, path := Path(folder, name))
            device = next(network.parameters()).device
            loads[name] = partial(torch.load, path, map_location=device, weights_only=False)  # written above
        return {name: timing.median for name, timing in policy.times(loads).items()}


def _memory(network: nn.Module, batch: Tensor, precision: torch.dtype) -> int | None:
    """Peak bytes of one batch, without the other networks on the device; None on a CPU."""
    if batch.device.type != "cuda" or not _is_plain(network):
        return None
    batch = _as_in(network, batch)
    own = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
    torch.cuda.reset_peak_memory_stats(batch.device)
    before = torch.cuda.memory_allocated(batch.device)
    with evaluating(network):
        _forward(network, batch, precision)
    return own + torch.cuda.max_memory_allocated(batch.device) - before
