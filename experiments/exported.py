"""Analyses of a network in the runtime that it is shipped for."""

import logging
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from facts.analysis.base import Analysis, AnalysisInputs, Findings
from facts.cost.count import count_flops
from facts.cost.timing import TimingPolicy
from facts.estimators import Estimator
from facts.saving.export import benchmark, loaded, runtimes_of
from facts.tasks.classification.base import features_of, percentage
from facts.utils.options import Count, options

for name in ("onnx_ir", "onnxscript"):
    logging.getLogger(name).setLevel(logging.WARNING)  # they report every node that they remove

FIRST = "OpenVINO, float32"  # what speed-ups are over, for the original


@options
class Exported(Analysis):
    """Top-1, megabytes and speed of a classifier in a `runtime` of `facts.saving.export`, such as `OpenVINO, int8`.

    int8 is calibrated on the calibration data; the held-out data judge, also by how often it agrees with the same
    network in PyTorch. `latency_ms` is that of a batch, `speedup` over the original in OpenVINO's float32, with which
    it takes turns.
    """

    runtime: str = FIRST
    batch_size: Count = 16
    timing: TimingPolicy = TimingPolicy()

    depends_on_device = True
    reads_layers = False

    def check(self, model: nn.Module, estimator: Estimator | None) -> None:
        known = runtimes_of(torch.device("cpu"), int8=True)
        refuse_unknown(self.runtime, [name for name in known if not name.startswith("PyTorch")])

    def run(self, inputs: AnalysisInputs) -> Findings:
        batches = list(inputs.held_out.data or ())
        images = batches[0][0][: self.batch_size]
        network = inputs.prepared.model if inputs.compressed is None else inputs.compressed
        data = inputs.prepared.data
        with TemporaryDirectory() as temporary:
            folder = Path(temporary, "own")
            call = loaded(network, self.runtime, images, folder, data)
            original = loaded(inputs.prepared.model, FIRST, images, Path(temporary, "original"), data)
            size = sum(path.stat().st_size for path in folder.iterdir())
            given = torch.cat([call(images).argmax(dim=1) for images, _ in batches])
            times = self.timing.times({"own": partial(call, images), "original": partial(original, images)})
        speed = {"latency_ms": 1000 * times["own"].median, "speedup": 1 / times["own"].ratio(times["original"])}
        logits, labels = features_of(network, batches)
        assert labels is not None
        right, same = given == labels, given == logits.argmax(dim=1)
        shares = {"exported_top1": percentage(right), "agreement": percentage(same)}
        outcomes = {"exported_top1": right, "agreement": same}
        return Findings({**shares, "megabytes": size / 1e6, **speed}, {}, outcomes)


@options
class InRuntime(Analysis):
    """Time and FLOPs (by the full rule) as fractions of the original's, in one `runtime` of `facts.saving.export`.

    Both networks take turns on a batch of noise. int8 is calibrated on the calibration data.
    """

    runtime: str = "PyTorch, float32"
    batch_size: Count = 16
    timing: TimingPolicy = TimingPolicy()

    depends_on_device = True
    reads_layers = False

    def check(self, model: nn.Module, estimator: Estimator | None) -> None:
        refuse_unknown(self.runtime, runtimes_of(next(model.parameters()).device, int8=True))

    def run(self, inputs: AnalysisInputs) -> Findings:
        batch = inputs.noise(self.batch_size)
        networks = {"dense": inputs.prepared.model, "compressed": inputs.compressed or inputs.prepared.model}
        int8 = inputs.prepared.data if self.runtime.endswith("int8") else None
        dense, compressed = benchmark(networks, batch, runtimes=[self.runtime], int8=int8, timing=self.timing)
        flops = [count_flops(network, batch[:1].to("meta"), "full") for network in networks.values()]
        return Findings(
            {
                "remaining_time": dense.throughput / compressed.throughput,
                "remaining_flops": flops[1] / flops[0],
                "dense_throughput": dense.throughput,
                "compressed_throughput": compressed.throughput,
                "speedup": compressed.throughput / dense.throughput,
            },
            {"spread": {each.network: each.spread for each in (dense, compressed)}},
        )


def refuse_unknown(runtime: str, known: list[str]) -> None:
    if runtime not in known:
        raise ValueError(f"there is no runtime {runtime!r} here: choose from {'; '.join(known) or 'none'}")
