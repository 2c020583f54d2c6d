"""Pass of calibration batches through a network: forward and, if gradients are needed, backward."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from facts.modules.lowrank import LinearLayer
from facts.modules.modes import autocast, without_autocast
from facts.modules.networks import run
from facts.moments.batch import LayerBatch
from facts.moments.capture import Capture, capturing
from facts.moments.losses import Loss, SampledTargets
from facts.utils.batches import batch_size, gathered, in_parts, numbered, to_device


@dataclass
class DataPass:
    """Call `add(name, batch)` for every batch of every layer; NaN, infinity and layers that never run are errors.

    `precision` is the autocast type of the model's passes (float32 or bfloat16). Each batch is divided into at most
    `num_parts` parts; `blocks` are checkpointed.
    """

    model: nn.Module
    layers: Mapping[str, LinearLayer]
    add: Callable[[str, LayerBatch], None]
    loss: Loss
    precision: torch.dtype
    needs_grads: bool
    num_parts: int = 1
    blocks: Iterable[nn.Module] = ()
    first_sample: int = field(default=0, init=False)
    finite: dict[str, tuple[Tensor, ...]] = field(default_factory=dict, init=False)

    def run(self, own: Iterable[tuple[Any, Any]], first_sample: int = 0, sums: Iterable[Tensor] = ()) -> int:
        """Run this process's share of the batches; then add up `sums` over processes.

        `first_sample` is the position in the data of the first sample over all processes. Returns the position after
        the last one. Raises `ValueError` if the data are empty, a layer never runs, or its values are not finite.
        """
        seen, exact = 0, without_autocast(next(self.model.parameters()).device)
        with exact, capturing(self.model, self.layers, self._hand_over, self.needs_grads, self.blocks) as capture:
            for number, position, batch in numbered(own, sums):
                loss = self.loss
                if isinstance(loss, SampledTargets):
                    loss = loss.drawn(loss.seed, number)
                self.first_sample = first_sample + position
                seen += batch_size(batch[0])
                for part in in_parts(batch, self.num_parts):
                    capture.start_batch(batch_size(part[0]))
                    self._pass(capture, loss, part)
                    self._check_finite(number)
                    self.first_sample += capture.num_samples
        if not (seen := sum(gathered([seen]))):
            raise ValueError("the calibration data is empty: it must yield at least one (inputs, targets) batch")
        ran = set().union(*gathered([capture.ever_ran]))
        if silent := [name for name in self.layers if name not in ran]:
            raise ValueError(f"layers that never ran on the calibration data: {', '.join(silent)}; leave them out")
        return first_sample + seen

    def _pass(self, capture: Capture, loss: Loss, batch: tuple[Any, Any]) -> None:
        device = next(self.model.parameters()).device
        inputs, targets = to_device(batch, device)
        with torch.set_grad_enabled(self.needs_grads):
            with autocast(device, self.precision):
                outputs = run(self.model, inputs)
                if capture.inputs_have_changed():  # nothing is added yet: run the batch once more, with copies
                    capture.start_batch(capture.num_samples)
                    outputs = run(self.model, inputs)
                total = loss(outputs, targets) if self.needs_grads else None
            del outputs  # logits of a language model take gigabytes
            if total is not None:
                total.backward()
            with autocast(device, self.precision):
                capture.finish_batch()

    def _hand_over(self, name: str, x: Tensor, g: Tensor | None) -> None:
        batch = LayerBatch(x, g, self.first_sample)
        # Kept on the device and read once per batch: a check here would synchronise the device at every layer.
        self.finite[name] = tuple(t.sum().isfinite() for t in ((batch.x,) if g is None else (batch.x, batch.g)))
        self.add(name, batch)

    def _check_finite(self, batch_number: int) -> None:
        all_flags = [flag for flags in self.finite.values() for flag in flags]
        if not all_flags or torch.stack(all_flags).all():  # read together, to wait for the device only once
            self.finite.clear()
            return
        # The first layer of the forward pass, then of the backward one, is closest to the cause.
        activations = [(name, "activations", 0) for name in self.layers]
        grads = [(name, "output gradients", 1) for name in reversed(list(self.layers))]
        for name, what, index in activations + (grads if self.needs_grads else []):
            if name in self.finite and not self.finite[name][index]:
                raise ValueError(
                    f"NaN or infinity in the {what} of layer {name}, in calibration batch {batch_number} (from 0); "
                    "check the data and the weights, or use precision float32"
                )
