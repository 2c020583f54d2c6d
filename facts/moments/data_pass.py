"""The data pass: batches through a network, and every linear's inputs and output gradients out of it.

Hooks note the inputs of each call of a linear in the forward pass, and its output gradient in the backward pass. Once
all calls of a linear are complete, it is handed over and its tensors are freed. Blocks that the network itself
checkpoints run again in the backward pass, where their calls are not noted.
"""

import gc
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from facts.modules.networks import autocast, frozen, hooked, run, without_autocast
from facts.moments.batch import LayerBatch, split_samples
from facts.moments.losses import Loss, SampledTargets
from facts.utils import distributed
from facts.utils.batches import Batches, Refusal, batch_size, in_parts, reading, to_device
from facts.utils.progress import waiting, with_progress

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_PARTS = 64


@dataclass
class DataPass:
    """Call `add(name, batch)` for every batch of every layer; NaN, infinity and layers that never run are errors.

    `precision` is the autocast type of the model's passes (float32 or bfloat16). Each batch is divided into at most
    `num_parts` parts.
    """

    model: nn.Module
    layers: Mapping[str, nn.Module]
    add: Callable[[str, LayerBatch], None]
    loss: Loss
    precision: torch.dtype
    needs_grads: bool
    num_parts: int = 1
    next_sample: int = field(default=0, init=False)  # its position in the data
    sums: dict[str, tuple[Tensor, ...]] = field(default_factory=dict, init=False)

    def run(self, batches: Batches, what: str, sums: Iterable[Tensor] = ()) -> int:
        """Run the batches, and show their number as the progress of `what`. Returns the number of samples.

        Each process that torchrun started runs its share; the `sums`, which `add` fills, are then added up over them,
        in place. Raises `ValueError` if the data are empty, a layer never runs, or its values are not finite.
        """
        rank, num_processes, position = distributed.rank(), distributed.size(), 0
        own = waiting(with_progress(batches[rank::num_processes], what))
        exact = without_autocast(next(self.model.parameters()).device)
        capture = Capture(self._hand_over, self.needs_grads)
        hooks = [(layer, partial(capture.note_call, name)) for name, layer in self.layers.items()]
        with exact, frozen(self.model), hooked(hooks):
            for turn in count():
                batch = next(own, None)
                sizes = distributed.all_gather(0 if batch is None else batch_size(batch[0]))
                if batch is not None:
                    self.next_sample = position + sum(sizes[:rank])
                    self._batch(capture, batch, turn * num_processes + rank)
                if not any(sizes):  # a process without batches left waits for the others
                    break
                position += sum(sizes)
        if not position:
            raise ValueError("the calibration data is empty: it must yield at least one (inputs, targets) batch")
        ran = set().union(*distributed.all_gather(capture.ever_ran))
        if silent := [name for name in self.layers if name not in ran]:
            raise ValueError(f"layers that never ran on the calibration data: {', '.join(silent)}; leave them out")
        self.next_sample = position
        distributed.all_reduce(sums)
        return position

    def _batch(self, capture: "Capture", batch: tuple[Any, Any], number: int) -> None:
        loss = self.loss.drawn(self.loss.seed, number) if isinstance(self.loss, SampledTargets) else self.loss
        for part in in_parts(batch, self.num_parts):
            capture.start_batch(batch_size(part[0]))
            self._pass(capture, loss, part)
            self._check_finite(number)
            self.next_sample += capture.num_samples

    def _pass(self, capture: "Capture", loss: Loss, batch: tuple[Any, Any]) -> None:
        device = next(self.model.parameters()).device
        inputs, targets = to_device(batch, device)
        with torch.set_grad_enabled(self.needs_grads):
            with autocast(device, self.precision):
                with reading(self.model, inputs):
                    outputs = run(self.model, inputs)
                if capture.inputs_have_changed():  # nothing is added yet: run the batch once more, with copies
                    capture.start_batch(capture.num_samples)
                    outputs = run(self.model, inputs)
                total = loss(outputs, targets) if self.needs_grads else None
            del outputs  # logits of a language model take gigabytes
            if total is not None:
                if not total.requires_grad:
                    raise ValueError("the loss does not depend on any of the layers: the network detaches its outputs")
                capture.is_forward = False
                total.backward()
            capture.finish_batch()

    def _hand_over(self, name: str, x: Tensor, g: Tensor | None, num_calls: int) -> None:
        if own := getattr(self.layers[name], "captured", None):  # not all of its rows count
            x, g = own(x), None if g is None else own(g)
        batch = LayerBatch(x, g, self.next_sample, num_calls)
        # Kept on the device and read once per batch: a check here would synchronise the device at every layer.
        self.sums[name] = tuple(tensor.sum() for tensor in ((batch.x,) if g is None else (batch.x, batch.g)))
        self.add(name, batch)

    def _check_finite(self, batch_number: int) -> None:
        all_sums = [total for sums in self.sums.values() for total in sums]
        if not all_sums or torch.stack(all_sums).isfinite().all():  # read together, to wait for the device only once
            self.sums.clear()
            return
        # The first layer of the forward pass, then of the backward one, is closest to the cause.
        activations = [(name, "activations", 0) for name in self.layers]
        grads = [(name, "output gradients", 1) for name in reversed(list(self.layers))]
        for name, what, index in activations + (grads if self.needs_grads else []):
            if name in self.sums and not self.sums[name][index].isfinite():
                raise ValueError(
                    f"NaN or infinity in the {what} of layer {name}, in calibration batch {batch_number} (from 0); "
                    "check the data and the weights, or use precision float32"
                )


def within_memory(run: Callable[[int], T], halve_batches: bool) -> T:
    """Call `run(num_parts)` with whole batches, then with more parts until they fit. Raises `MemoryError`."""
    num_parts = 1
    while True:
        try:
            return distributed.on_all_ranks(partial(run, num_parts))
        except torch.OutOfMemoryError as error:
            if not halve_batches or num_parts == MAX_PARTS:
                raise MemoryError(
                    f"the device ran out of memory with batches in {num_parts} parts ({error}); lower the batch size, "
                    'give MemoryPolicy(moments="host"), or let MemoryPolicy(halve_batches=True) divide the batches'
                ) from error
        num_parts *= 2
        gc.collect()  # errors and their frames can refer to each other, and to tensors on the device
        torch.cuda.empty_cache()
        log.warning("out of memory: starting the pass again with each batch in %d parts", num_parts)


@dataclass
class _Call:
    """One call of a layer in a forward pass; its gradient arrives later."""

    output_shape: torch.Size
    inputs: Tensor
    inputs_version: int
    output_grad: Tensor | None = None


class Capture:
    """Hooks on layers of one model that hand over `(layer, inputs [N, T, d_in], output_grads [N, T, d_out])`.

    A layer that is called several times in a forward pass is handed over once, with its tokens joined: as soon as
    its gradients are complete or, without gradients (the second tensor is None), at the end of the batch.
    """

    def __init__(self, consume: Callable[[str, Tensor, Tensor | None, int], None], with_grads: bool):
        self.consume, self.with_grads = consume, with_grads
        self.num_samples = 0
        self.calls: dict[str, list[_Call]] = {}
        self.is_forward = True
        self.copied: set[str] = set()  # layers whose inputs the network changes in place
        self.ever_ran: set[str] = set()

    def start_batch(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.is_forward = True
        self.calls.clear()

    def inputs_have_changed(self) -> bool:
        """Check whether the network changed an input of a layer in place; from now on, copy that input."""
        changed = {
            name
            for name, calls in self.calls.items()
            if any(call.inputs._version != call.inputs_version for call in calls)
        }
        self.copied |= changed
        return bool(changed)

    def finish_batch(self) -> None:
        """Hand over the remaining layers: all or, with gradients, those with a call that did not affect the loss.

        Such a call has a gradient of zero. Raises `ValueError` for a layer if none of its calls affected the loss.
        """
        for name, calls in list(self.calls.items()):
            if self.with_grads and all(call.output_grad is None for call in calls):
                raise ValueError(f"layer {name} ran, but the loss does not depend on it; leave it out of the layers")
            self._hand_over(name)

    def note_call(self, name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Forward hook of a layer."""
        self.ever_ran.add(name)
        if self.with_grads and not torch.is_grad_enabled():
            raise Refusal(f"layer {name} is called without gradients, as in torch.no_grad(): leave the layer out")
        if self.with_grads and not output.requires_grad:  # the first layers: nothing before them needs a graph
            output = output.detach().requires_grad_().clone()
        if not self.is_forward:  # a block that the network checkpoints runs again
            return output
        inputs = args[0].detach().clone() if name in self.copied else args[0].detach()
        calls = self.calls.setdefault(name, [])
        if self.with_grads:  # by number, since the graph outlives the call, whose memory is freed
            output.register_hook(partial(self._note_grad, name, len(calls)))
        calls.append(_Call(output.shape, inputs, inputs._version))
        return output

    def _note_grad(self, name: str, number: int, grad: Tensor) -> None:
        self.calls[name][number].output_grad = grad.detach()
        if all(call.output_grad is not None for call in self.calls[name]):
            self._hand_over(name)

    def _hand_over(self, name: str) -> None:
        inputs, grads = [], []
        for call in self.calls.pop(name):
            inputs.append(split_samples(call.inputs, self.num_samples, name))
            if self.with_grads:
                grad = call.inputs.new_zeros(call.output_shape) if call.output_grad is None else call.output_grad
                grads.append(split_samples(grad, self.num_samples, name))
        x, *g = (each[0] if len(each) == 1 else torch.cat(each, dim=1) for each in (inputs, grads) if each)
        self.consume(name, x, g[0] if g else None, len(inputs))
