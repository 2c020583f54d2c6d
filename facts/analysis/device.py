"""The record of a device: how fast it runs a compressed network, and what a data pass takes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from facts.analysis.base import Findings, Subject
from facts.analysis.throughput import Throughput
from facts.calibration.prepare import Calibration, prepare
from facts.estimators.methods.facts import FACTS
from facts.modules.modes import autocast
from facts.utils.batches import batch_size, to_device
from facts.utils.options import options


@options
class DeviceRecord(Throughput):
    """Throughput, and the seconds that FACTS's data pass takes for 1,000 samples, on layers and on units.

    The passes take turns on the first batch. `plain_pass` is forward and backward with the gradients of all weights:
    an optimiser's step without its update. On a GPU, `_gib` is the peak of its memory.
    """

    def run(self, subject: Subject) -> Findings:
        found, given = super().run(subject), subject.calibration
        device = next(subject.model.parameters()).device
        inputs, targets = to_device(next(iter(given.data or ())), device)
        passes: dict[str, Callable[[], Any]] = {"plain_pass": partial(plain_pass, given, inputs, targets)}
        for parts in ("layers", "units"):
            execution = replace(given.execution, cache=None)
            own = prepare(
                subject.model, [(inputs, targets)], held_out=(), loss=given.loss, execution=execution, parts=parts
            )
            passes[f"{parts}_pass"] = partial(own.moments, own.suited(FACTS()).moments, cached=False)
        for name, timing in self.timing.times(passes).items():
            found.metrics[f"{name}_seconds"] = 1000 * timing.median / batch_size(inputs)
        for name, run in passes.items() if device.type == "cuda" else ():
            torch.cuda.reset_peak_memory_stats(device)
            run()
            found.metrics[f"{name}_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        return found


def plain_pass(calibration: Calibration, inputs: Any, targets: Any) -> None:
    model: nn.Module = calibration.model
    model.zero_grad(set_to_none=True)
    with autocast(next(model.parameters()).device, calibration.execution.precision):
        loss = calibration.loss(model(inputs), targets)
    loss.backward()
    model.zero_grad(set_to_none=True)
