"""Repeated runs of a network with one layer changed, without recomputing the modules before that layer."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from facts.modules.modes import replaced_forwards
from facts.modules.networks import run


@dataclass
class _Trace:
    """The calls of one module in the original forward pass; `within` holds the modules that enclose each call.

    A module `must_run` again if it changed its inputs in place, or returned a view of them that was changed later.
    """

    began: int
    ended: int = 0
    outputs: list[Any] = field(default_factory=list)
    within: list[set[str]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    must_run: bool = False


class Prefix:
    """The original forward pass on one batch, recorded module by module.

    When a layer is changed, modules whose calls all ended before the layer's first call return their recorded outputs.
    Operations between modules, within a `forward`, run again. The outputs of all modules are kept in memory.
    """

    def __init__(self, model: nn.Module, inputs: Any):
        self.model, self.inputs = model, inputs
        self.modules = dict(model.named_modules())
        self.copied: set[str] = set()
        self.outputs = self._record()
        while changed := {name for name, trace in self.traces.items() if _versions(trace.outputs) != trace.versions}:
            self.copied |= changed  # the network went on to change these outputs in place: keep copies
            self.outputs = self._record()

    def _record(self) -> Any:
        """Run the original network once."""
        self.traces: dict[str, _Trace] = {}
        self.clock = 0
        self.running: list[str] = []
        watched = {module: partial(self._watch, name, module.forward) for name, module in self.modules.items() if name}
        with replaced_forwards(watched):
            return run(self.model, _copy(self.inputs))

    def _watch(self, name: str, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """Record one call of a module's `forward`, without hooks, which run again on the recorded output."""
        self.clock += 1
        trace = self.traces.setdefault(name, _Trace(began=self.clock))
        trace.within.append(set(self.running))
        self.running.append(name)
        inputs = (args, kwargs)
        before = _versions(inputs)
        output = forward(*args, **kwargs)
        trace.must_run |= _versions(inputs) != before
        trace.must_run |= name in self.copied and not _memory(output).isdisjoint(_memory(inputs))
        self.running.pop()
        self.clock += 1
        trace.ended = self.clock
        trace.outputs.append(_copy(output) if name in self.copied else output)
        trace.versions += _versions(trace.outputs[-1])
        return output

    @contextmanager
    def before(self, layers: Collection[str]) -> Iterator[Callable[[dict[str, Callable[[Tensor], Tensor]]], Any]]:
        """Yield a function that runs the network with other forward functions for these layers."""
        for layer in layers:
            if layer not in self.traces:
                raise ValueError(f"layer {layer} does not run on these inputs; leave it out of the layers")
        began = min(self.traces[layer].began for layer in layers)
        known = {name: trace for name, trace in self.traces.items() if trace.ended < began and not trace.must_run}
        # Modules that do not run again do not call the modules within them.
        outputs = {
            name: [each for each, within in zip(trace.outputs, trace.within, strict=True) if within.isdisjoint(known)]
            for name, trace in known.items()
        }

        def run_with(changed: dict[str, Callable[[Tensor], Tensor]]) -> Any:
            forwards = {name: self._replay(name, known_outputs) for name, known_outputs in outputs.items()} | changed
            with replaced_forwards({self.modules[name]: new for name, new in forwards.items()}):
                return run(self.model, _copy(self.inputs))  # a network may change its input in place

        yield run_with

    def _replay(self, name: str, outputs: list[Any]) -> Callable[..., Any]:
        remaining = iter(outputs)
        return lambda *args, **kwargs: _copy(next(remaining)) if name in self.copied else next(remaining)


def _copy(output: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, output)


def _versions(value: Any) -> list[int]:
    return [tensor._version for tensor in _tensors(value)]


def _memory(value: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in _tensors(value)}


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor))
