"""How fast networks are on the device that they lie on."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from facts.hardware.timing import TimingPolicy
from facts.layers import evaluating
from facts.moments.data_pass import autocast


@dataclass(frozen=True)
class Speed:
    """Samples a second in batches, `spread` its interquartile range as a share of it; seconds for one sample alone.

    `memory` is the most that a batch takes on the device, in bytes, the network included; None on a CPU.
    """

    throughput: float
    spread: float
    latency: float
    memory: int | None


def speeds(
    networks: Mapping[str, nn.Module],
    batch: Tensor,
    policy: TimingPolicy,
    precision: torch.dtype = torch.float32,
    compiled: bool = False,
) -> dict[str, Speed]:
    """Of networks that take turns on one batch `[N, ...]`, and on its first sample."""
    runs = {name: torch.compile(network) if compiled else network for name, network in networks.items()}
    with ExitStack() as stack:
        for network in networks.values():
            stack.enter_context(evaluating(network))
        whole, single = (
            policy.times({name: partial(_forward, run, inputs, precision) for name, run in runs.items()})
            for inputs in (batch, batch[:1])
        )
        memory = {name: _memory(run, batch, precision) for name, run in runs.items()}
    return {
        name: Speed(len(batch) / whole[name].median, whole[name].spread, single[name].median, memory[name])
        for name in networks
    }


@torch.inference_mode()
def _forward(network: nn.Module, inputs: Tensor, precision: torch.dtype) -> None:
    with autocast(inputs.device, precision):
        network(inputs)


def _memory(network: nn.Module, batch: Tensor, precision: torch.dtype) -> int | None:
    """The other networks that lie on the device do not count."""
    if batch.device.type != "cuda":
        return None
    own = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
    torch.cuda.reset_peak_memory_stats(batch.device)
    before = torch.cuda.memory_allocated(batch.device)
    _forward(network, batch, precision)
    return own + torch.cuda.max_memory_allocated(batch.device) - before
