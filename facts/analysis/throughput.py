"""Throughput of a compressed network on this device."""

from dataclasses import asdict
from typing import Annotated

from pydantic import Field

from facts.analysis.base import Analysis, Findings, Subject
from facts.analysis.variants import VARIANTS, Variant
from facts.cost.speed import speeds
from facts.cost.timing import TimingPolicy
from facts.modules.networks import noise
from facts.utils.options import options


@options
class Throughput(Analysis):
    """Samples per second of the compressed network, of the original, and of other `variants`, which take turns.

    `residual` adds MemViT's residual to each low-rank layer, `half` is the original in half precision, and
    `two_of_four` makes its layers 2:4 sparse. A variant that the device cannot run is left out; the values hold the
    reason. `speedup` is that of the compressed network over the original, `two_of_four_speedup` that of 2:4 sparsity
    over `half`; `latency_ms` is the time of one batch in the compressed network.
    """

    batch_size: Annotated[int, Field(ge=1)]
    timing: TimingPolicy = TimingPolicy()
    compiled: bool = False
    variants: tuple[Variant, ...] = ()

    depends_on_device = True

    def run(self, subject: Subject) -> Findings:
        networks, missing = {"dense": subject.model}, {}
        if subject.compressed is not None:
            networks["compressed"] = subject.compressed
            for name in self.variants:
                try:
                    networks[name] = VARIANTS[name](subject.model, subject.compressed, subject.layers)
                except NotImplementedError as reason:
                    missing[name] = str(reason)
        inputs, _ = next(iter(subject.held_out.data or ()))
        device = next(subject.model.parameters()).device
        batch = noise(subject.model, (self.batch_size, *inputs.shape[1:]), device)
        found = speeds(networks, batch, self.timing, subject.held_out.execution.precision, self.compiled)
        result = found.get("compressed", found["dense"])
        metrics = {f"{name}_throughput": speed.throughput for name, speed in found.items()}
        metrics["speedup"] = result.throughput / found["dense"].throughput
        if {"half", "two_of_four"} <= found.keys():
            metrics["two_of_four_speedup"] = found["two_of_four"].throughput / found["half"].throughput
        metrics["latency_ms"] = 1000 * self.batch_size / result.throughput
        return Findings(metrics, {"speeds": {name: asdict(speed) for name, speed in found.items()}, "missing": missing})
