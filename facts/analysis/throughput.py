"""Speed on this device: of a compressed network, of other ways to make its layers cheaper, and of a data pass."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import sqrt
from statistics import stdev
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from facts.analysis.base import Analysis, AnalysisInputs, Findings
from facts.calibration.prepare import prepare
from facts.calibration.prepared_model import PreparedModel
from facts.cost.timing import TimingPolicy, batch_seconds
from facts.estimators.methods.facts import FACTS
from facts.modules.forms import PLAIN
from facts.modules.lowrank import LowRankLayer, LowRankLinear
from facts.modules.networks import autocast
from facts.utils.batches import batch_size, to_device
from facts.utils.options import Count, options

Variant = Literal["residual", "half", "two_of_four"]
RESIDUAL_SHARE = 0.05  # of the layer's parameters (MemViT, as the paper's supplement reads it)


class WithResidual(nn.Module):
    """The sum of a low-rank layer and a smaller one (MemViT; Azizi et al., 2024)."""

    def __init__(self, main: LowRankLayer, rank: int):
        super().__init__()
        self.main = main
        weight = next(main.parameters())
        left, right = weight.new_ones(main.out_features, rank), weight.new_ones(rank, main.in_features)
        self.residual = LowRankLinear(left, right)

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x) + self.residual(x)


def make_variant(name: Variant, model: nn.Module, compressed: nn.Module, layers: Iterable[str]) -> nn.Module:
    """Make a variant. Raises `NotImplementedError` if the device has no 2:4 sparse format."""
    network = copy.deepcopy(compressed) if name == "residual" else copy.deepcopy(model).half()
    device = next(model.parameters()).device
    if name == "two_of_four" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        raise NotImplementedError("2:4 sparsity needs an NVIDIA GPU of compute capability 8.0 or newer")
    for each in layers:
        layer = network.get_submodule(each)
        if name == "residual" and isinstance(layer, LowRankLayer):
            rank = PLAIN.rank_of_ratio(layer.out_features, layer.in_features, RESIDUAL_SHARE)
            network.set_submodule(each, WithResidual(layer, rank))
        elif name == "two_of_four":  # drop the two smallest of every four weights in a row
            groups = layer.weight.detach().unflatten(1, (-1, 4))
            keep = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, groups.abs().topk(2).indices, True)
            sparse = torch.sparse.to_sparse_semi_structured((groups * keep).flatten(1))
            layer.weight = nn.Parameter(sparse, requires_grad=False)
    return network


@options
class Throughput(Analysis):
    """Samples per second of the compressed network, the original and other `variants`, measured in turns.

    `residual` adds MemViT's residual to each low-rank layer, `half` is the original in half precision, `two_of_four`
    makes its layers 2:4 sparse; variants are for timing only. If the device cannot run a variant, the values hold the
    reason. `speedup` is over the original, with its standard error over turns, `two_of_four_speedup` over `half`;
    `latency_ms` is that of one batch.
    """

    batch_size: Count
    timing: TimingPolicy = TimingPolicy()
    variants: tuple[Variant, ...] = ()

    depends_on_device = True

    @property
    def reads_layers(self) -> bool:  # type: ignore[override]
        return bool(self.variants)

    def run(self, inputs: AnalysisInputs) -> Findings:
        networks: dict[str, Any] = {"dense": inputs.prepared.model}
        missing = {}
        if inputs.compressed is not None:
            networks["compressed"] = inputs.compressed
            for name in self.variants:
                try:
                    networks[name] = make_variant(
                        name, inputs.prepared.model, inputs.compressed, inputs.prepared.layers
                    )
                except NotImplementedError as reason:
                    missing[name] = str(reason)
        batch = inputs.noise(self.batch_size)
        timings = batch_seconds(networks, batch, self.timing, inputs.held_out.execution.precision)
        speeds = {name: len(batch) / timing.median for name, timing in timings.items()}
        result = speeds.get("compressed", speeds["dense"])
        metrics = {f"{name}_throughput": speed for name, speed in speeds.items()}
        metrics["speedup"] = result / speeds["dense"]
        turns = zip(timings["dense"].seconds, timings.get("compressed", timings["dense"]).seconds, strict=True)
        ratios = [dense / compressed for dense, compressed in turns]
        metrics["speedup_error"] = stdev(ratios) / sqrt(len(ratios))
        if {"half", "two_of_four"} <= speeds.keys():
            metrics["two_of_four_speedup"] = speeds["two_of_four"] / speeds["half"]
        metrics["latency_ms"] = 1000 * self.batch_size / result
        found = {name: {"throughput": speed, "spread": timings[name].spread} for name, speed in speeds.items()}
        return Findings(metrics, {"speeds": found, "missing": missing})


@options
class DeviceRecord(Throughput):
    """Throughput, and the seconds that FACTS's data pass takes for 1,000 samples, on layers and on units.

    The passes take turns on the first batch. `plain_pass` is forward and backward with the gradients of all weights:
    an optimiser's step without its update. A data pass takes what a second batch adds to it: its beginning and end
    come once, however many samples there are. `_busy_seconds` are those in which the device computes: on a GPU, far
    fewer if it waits for launches. On a GPU, `_gib` is the peak of its memory.
    """

    def run(self, inputs: AnalysisInputs) -> Findings:
        found, prepared = super().run(inputs), inputs.prepared
        device = prepared.device
        batch = to_device(next(iter(prepared.data or ())), device)
        passes: dict[str, Callable[[], Any]] = {"plain_pass": partial(plain_pass, prepared, *batch)}
        shorter: dict[str, Callable[[], Any]] = {}  # the same data passes over one batch less
        for parts in ("layers", "units"):
            execution = replace(prepared.execution, cache=None)
            own = prepare(prepared.model, [batch], held_out=(), loss=prepared.loss, execution=execution, parts=parts)
            for calls, number in ((shorter, 1), (passes, 2)):
                several = own.on([batch] * number)
                calls[f"{parts}_pass"] = partial(several.moments, own.resolve_defaults(FACTS()).moments, cached=False)
        with torch.cuda.device_of(next(prepared.model.parameters())):
            times = self.timing.times(passes | {f"shorter {name}": call for name, call in shorter.items()})
        for name, call in passes.items():
            seconds, busy = times[name].median, busy_seconds(call, device)
            if name in shorter:
                seconds -= times[f"shorter {name}"].median
                busy -= busy_seconds(shorter[name], device)
            found.metrics[f"{name}_seconds"] = 1000 * seconds / batch_size(batch[0])
            found.metrics[f"{name}_busy_seconds"] = 1000 * busy / batch_size(batch[0])
        for name, run in passes.items() if device.type == "cuda" else ():
            torch.cuda.reset_peak_memory_stats(device)
            run()
            found.metrics[f"{name}_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        return found


def busy_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Sum up the seconds of the kernels that a call runs on a GPU, or of its operations on a CPU."""
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind], acc_events=True) as profiler:  # else it warns of cycles, of which there is one
        call()
    field = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return sum(getattr(event, field) for event in profiler.key_averages() if not event.is_user_annotation) / 1e6


def plain_pass(prepared: PreparedModel, inputs: Any, targets: Any) -> None:
    model: nn.Module = prepared.model
    model.zero_grad(set_to_none=True)
    with autocast(prepared.device, prepared.execution.precision):
        loss = prepared.loss(model(inputs), targets)
    loss.backward()
    model.zero_grad(set_to_none=True)
