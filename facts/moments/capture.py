"""Capture of the inputs and output gradients of each layer, passed on as soon as they are complete."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from facts.modules.lowrank import LinearLayer
from facts.modules.modes import frozen, replaced_forwards
from facts.moments.batch import split_samples
from facts.moments.checkpointing import Checkpoints


@dataclass
class _Call:
    """One call of a layer in a forward pass; its gradient arrives later, as do the inputs in a checkpointed block."""

    output_shape: torch.Size
    inputs: Tensor | None = None
    inputs_version: int = 0
    output_grad: Tensor | None = None

    @property
    def is_complete(self) -> bool:
        return self.inputs is not None and self.output_grad is not None


class Capture:
    """Hooks on layers of one model that hand over `(layer, inputs [N, T, d_in], output_grads [N, T, d_out])`.

    A layer that is called several times in a forward pass is handed over once, with its tokens joined: as soon as
    its gradients are complete or, without gradients (the second tensor is None), at the end of the batch. Inputs in a
    checkpointed block are captured when the block runs again.
    """

    def __init__(self, consume: Callable[[str, Tensor, Tensor | None], None], with_grads: bool):
        self.consume = consume
        self.with_grads = with_grads
        self.num_samples = 0
        self.calls: dict[str, list[_Call]] = {}
        self.checkpoints = Checkpoints()
        self.ever_ran: set[str] = set()
        self.copied: set[str] = set()

    def inputs_have_changed(self) -> bool:
        """Check whether the network changed an input of a layer or a block in place; from now on, copy that input."""
        changed = {
            name
            for name, calls in self.calls.items()
            if any(call.inputs is not None and call.inputs._version != call.inputs_version for call in calls)
        }
        self.copied |= changed
        return self.checkpoints.arguments_have_changed() or bool(changed)

    def start_batch(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.calls.clear()
        self.checkpoints.runs.clear()

    def finish_batch(self) -> None:
        """Hand over the remaining layers: all or, with gradients, those with a call that did not affect the loss.

        Such a call has a gradient of zero. Raises `ValueError` for a layer if none of its calls affected the loss.
        Blocks may rerun here, so the autocast type must be that of the forward pass.
        """
        self.checkpoints.finish()
        for name, calls in list(self.calls.items()):
            if self.with_grads and all(call.output_grad is None for call in calls):
                raise ValueError(f"layer {name} ran, but the loss does not depend on it; leave it out of the layers")
            self._hand_over(name)

    def forward_hook(self, name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        self.ever_ran.add(name)
        inputs, run = args[0].detach(), self.checkpoints.current
        if self.with_grads and not output.requires_grad:  # the first layers: nothing before them needs a graph
            output = output.detach().requires_grad_().clone()
        if run and run.again:
            call = run.calls[name].popleft()
            call.inputs = inputs.clone()  # the block may still change them
            self._hand_over_if_complete(name)
            return output
        call = _Call(output.shape)
        self.calls.setdefault(name, []).append(call)
        if run:
            run.calls[name].append(call)
        else:
            call.inputs = inputs.clone() if name in self.copied else inputs
            call.inputs_version = call.inputs._version
        if self.with_grads:
            output.register_hook(partial(self._grad_hook, name, call))
        return output

    def _grad_hook(self, name: str, call: _Call, grad: Tensor) -> None:
        call.output_grad = grad.detach()
        self._hand_over_if_complete(name)

    def _hand_over_if_complete(self, name: str) -> None:
        if all(call.is_complete for call in self.calls[name]):
            self._hand_over(name)

    def _hand_over(self, name: str) -> None:
        inputs, grads = [], []
        for call in self.calls.pop(name):
            assert call.inputs is not None
            inputs.append(split_samples(call.inputs, self.num_samples, name))
            if self.with_grads:
                grad = call.inputs.new_zeros(call.output_shape) if call.output_grad is None else call.output_grad
                grads.append(split_samples(grad, self.num_samples, name))
            call.inputs = call.output_grad = None  # free the memory: hooks of the graph still refer to the call
        x, *g = (each[0] if len(each) == 1 else torch.cat(each, dim=1) for each in (inputs, grads) if each)
        with torch.autocast(x.device.type, enabled=False):  # a block may be running again under autocast
            self.consume(name, x, g[0] if g else None)


@contextmanager
def capturing(
    model: nn.Module,
    layers: Mapping[str, LinearLayer],
    consume: Callable[[str, Tensor, Tensor | None], None],
    with_grads: bool = True,
    blocks: Iterable[nn.Module] = (),
) -> Iterator[Capture]:
    """Feed `consume` from every pass through `model` inside the `with` block; the model is restored afterwards.

    `blocks` are modules that run again in the backward pass, if there is one, instead of keeping their activations.
    """
    capture = Capture(consume, with_grads)
    forwards = {block: capture.checkpoints.forward_of(block) for block in blocks} if with_grads else {}
    with ExitStack() as stack, frozen(model), replaced_forwards(forwards):
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(partial(capture.forward_hook, name)).remove)
        yield capture
