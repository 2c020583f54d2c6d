"""How much faster a compressed network is, on the device at hand."""

from dataclasses import asdict
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from facts.analysis.base import Analysis, Findings, Subject
from facts.hardware import VARIANTS, TimingPolicy, speeds


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Throughput(Analysis):
    """Samples a second of the original and of the compressed network, and of other `variants`, which take turns.

    `speedup` is the ratio of their throughputs, `latency_speedup` that of their latencies with one sample. `residual`
    adds MemViT's residual to each low-rank layer, `two_of_four` makes the original's layers 2:4 sparse. What the device
    cannot run is left out, with the reason among the values.
    """

    batch_size: Annotated[int, Field(ge=1)]
    timing: TimingPolicy = TimingPolicy()
    compiled: bool = False
    variants: tuple[Literal[*VARIANTS], ...] = ()

    depends_on_device: ClassVar[bool] = True

    def run(self, subject: Subject) -> Findings:
        if subject.compressed is None:
            raise ValueError("throughput compares a compressed network with its original: choose an estimator")
        networks, missing = {"dense": subject.model, "low_rank": subject.compressed}, {}
        for name in self.variants:
            try:
                networks[name] = VARIANTS[name](subject.model, subject.compressed, subject.layers)
            except NotImplementedError as reason:
                missing[name] = str(reason)
        images, _ = next(iter(subject.held_out))
        device = next(subject.model.parameters()).device
        batch = torch.randn(self.batch_size, *images.shape[1:], device=device)
        found = speeds(networks, batch, self.timing, subject.precision, self.compiled)
        dense = found["dense"]
        metrics = {f"{name}_throughput": speed.throughput for name, speed in found.items()}
        metrics |= {
            "speedup": found["low_rank"].throughput / dense.throughput,
            "latency_speedup": dense.latency / found["low_rank"].latency,
        }
        return Findings(metrics, {"speeds": {name: asdict(speed) for name, speed in found.items()}, "missing": missing})
