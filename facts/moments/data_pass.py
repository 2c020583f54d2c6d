"""Calibration batches through a network, forwards and, if gradients are needed, backwards."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from facts.modules.modes import autocast
from facts.modules.networks import run
from facts.moments.batch import LayerBatch
from facts.moments.capture import Capture, capturing
from facts.moments.losses import Loss, SampledLabels
from facts.utils import distributed
from facts.utils.batches import batch_size, in_parts, to_device


class DataPass:
    """Hands every batch of every layer to `add(name, batch)`; NaN, infinity and layers that never run are errors.

    `precision` is the autocast type of the model's passes (float32 or bfloat16). Each batch is divided into at most
    `num_parts` parts; `blocks` are checkpointed. Each of several processes runs its share of the batches
    (`facts.utils.distributed.shard`).
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Linear],
        add: Callable[[str, LayerBatch], None],
        loss: Loss,
        precision: torch.dtype,
        needs_grads: bool,
        num_parts: int = 1,
        blocks: Iterable[nn.Module] = (),
    ):
        self.model, self.layers, self.add, self.precision = model, layers, add, precision
        self.loss, self.needs_grads, self.num_parts, self.blocks = loss, needs_grads, num_parts, blocks
        self.first_sample = 0
        self.device = next(model.parameters()).device
        self.finite: dict[str, tuple[Tensor, ...]] = {}

    def run(self, batches: Iterable[tuple[Any, Any]], first_sample: int = 0) -> int:
        """Run the batches, whose first sample has the given position in the data; return the position after their last.

        Raises `ValueError` if the data are empty or a layer's values are not finite.
        """
        seen = 0
        with capturing(self.model, self.layers, self._hand_over, self.needs_grads, self.blocks) as capture:
            for number, position, batch in numbered(batches):
                loss = self.loss.of_batch(number) if isinstance(self.loss, SampledLabels) else self.loss
                self.first_sample = first_sample + position
                seen += batch_size(batch[0])
                for part in in_parts(batch, self.num_parts):
                    num_samples = batch_size(part[0])
                    capture.start_batch(num_samples)
                    with torch.set_grad_enabled(self.needs_grads):
                        self._pass(capture, loss, *to_device(part, self.device))
                    self._check_finite(number)
                    self.first_sample += num_samples
        seen = sum(distributed.all_gather(seen))
        if not seen:
            raise ValueError("the calibration data is empty: it must yield at least one (inputs, targets) batch")
        ran = set().union(*distributed.all_gather(capture.ever_ran))
        if silent := [name for name in self.layers if name not in ran]:
            raise ValueError(f"layers that never ran on the calibration data: {', '.join(silent)}; leave them out")
        return first_sample + seen

    def _pass(self, capture: Capture, loss: Loss, inputs: Any, targets: Any) -> None:
        with autocast(self.device, self.precision):
            outputs = run(self.model, inputs)
            if capture.inputs_have_changed():  # nothing is added yet: run the batch once more, with copies
                capture.start_batch(capture.num_samples)
                outputs = run(self.model, inputs)
            total = loss(outputs, targets) if self.needs_grads else None
        del outputs  # logits of a language model take gigabytes
        if total is not None:
            total.backward()
        with autocast(self.device, self.precision):
            capture.finish_batch()

    def _hand_over(self, name: str, x: Tensor, g: Tensor | None) -> None:
        batch = LayerBatch(x, g, self.first_sample)
        # Stays on the device and is read once a batch: a check here would synchronise the device at every layer.
        self.finite[name] = tuple(t.sum().isfinite() for t in ((batch.x,) if g is None else (batch.x, batch.g)))
        self.add(name, batch)

    def _check_finite(self, batch_number: int) -> None:
        all_flags = [flag for flags in self.finite.values() for flag in flags]
        if not all_flags or torch.stack(all_flags).all():  # read together: the device is waited for once
            self.finite.clear()
            return
        # The first layer of the forward pass, then of the backward one, is the nearest to the cause.
        activations = [(name, "activations", 0) for name in self.layers]
        grads = [(name, "output gradients", 1) for name in reversed(list(self.layers))]
        for name, what, index in activations + (grads if self.needs_grads else []):
            if name in self.finite and not self.finite[name][index]:
                raise ValueError(
                    f"NaN or infinity in the {what} of layer {name}, in calibration batch {batch_number} (from 0); "
                    "check the data and the weights, or use precision float32"
                )


def numbered(batches: Iterable[tuple[Any, Any]]) -> Iterator[tuple[int, int, tuple[Any, Any]]]:
    """Batches of this process's share, each with its number and its first sample's position in the data."""
    iterator = iter(batches)
    first_sample = 0
    for turn in itertools.count():
        batch = next(iterator, None)
        sizes = distributed.all_gather(0 if batch is None else batch_size(batch[0]))
        if batch is not None:
            before = sum(sizes[: distributed.rank()])
            yield turn * len(sizes) + distributed.rank(), first_sample + before, batch
        if not any(sizes):  # finished processes wait for the others
            return
        first_sample += sum(sizes)
