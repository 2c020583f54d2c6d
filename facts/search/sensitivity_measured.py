"""Sensitivity measured by running the network with one layer compressed (paper, section 4.3, stage 1)."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from facts.modules.lowrank import LowRankLayer
from facts.modules.networks import autocast, evaluating, hooked, replaced_forwards, run
from facts.moments.data_pass import within_memory
from facts.moments.losses import squared_error
from facts.search.base import AllocationProblem, Profile
from facts.utils.batches import batch_size, in_parts, reading, to_device, versions_of
from facts.utils.cache import calibration_key, content_key, name_of
from facts.utils.progress import progress_of


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
        while changed := {name for name, trace in self.traces.items() if versions_of(trace.outputs) != trace.versions}:
            self.copied |= changed  # the network went on to change these outputs in place: keep copies
            self.outputs = self._record()

    def _record(self) -> Any:
        """Run the original network once."""
        self.traces: dict[str, _Trace] = {}
        self.clock = 0
        self.running: list[str] = []
        watched = {module: partial(self._watch, name, module.forward) for name, module in self.modules.items() if name}
        with replaced_forwards(watched), reading(self.model, self.inputs):
            return run(self.model, _copy(self.inputs))

    def _watch(self, name: str, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """Record one call of a module's `forward`, without hooks, which run again on the recorded output."""
        self.clock += 1
        trace = self.traces.setdefault(name, _Trace(began=self.clock))
        trace.within.append(set(self.running))
        self.running.append(name)
        inputs = (args, kwargs)
        before = versions_of(inputs)
        output = forward(*args, **kwargs)
        trace.must_run |= versions_of(inputs) != before
        trace.must_run |= name in self.copied and not _memory(output).isdisjoint(_memory(inputs))
        self.running.pop()
        self.clock += 1
        trace.ended = self.clock
        trace.outputs.append(_copy(output) if name in self.copied else output)
        trace.versions += versions_of(trace.outputs[-1])
        return output

    def before(self, layers: Collection[str]) -> Callable[[dict[str, Callable[[Tensor], Tensor]]], Any]:
        """Return a function that runs the network with other forward functions for these layers."""
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

        return run_with

    def _replay(self, name: str, outputs: list[Any]) -> Callable[..., Any]:
        remaining = iter(outputs)
        return lambda *args, **kwargs: _copy(next(remaining)) if name in self.copied else next(remaining)


def _copy(output: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, output)


def _memory(value: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree_iter(value) if isinstance(leaf, Tensor)}


class Sensitivity:
    """Errors of the network with one layer at one rank, measured at first use and kept in the problem's cache.

    Each is a mean over samples: of the calibration's output error (`of="output"`), of its loss on given labels
    (`of="loss"`), or of the relative squared error of the last linear layer's inputs (`of="features"`), as in FLAR-SVD.
    """

    def __init__(self, problem: AllocationProblem, of: str = "output"):
        self.problem, self.of, self.batches = problem, of, problem.sensitivity_batches()
        prepared = problem.prepared
        errors: dict[str, Callable[[Any, Any], Tensor]] = {"features": squared_error, "loss": prepared.loss}
        self.error = errors.get(of, prepared.output_error)
        self.known: Profile = defaultdict(dict)
        if problem.cache:
            argument = "loss" if of == "loss" else "output_error"
            key = content_key(calibration_key(self.batches), name_of(self.error, argument))
            self.file = f"sensitivity-{of}-{key}"
            for name, table in (problem.cache.load(self.file) or {}).items():
                self.known[name] = {int(rank): error for rank, error in table.tolist()}

    def profile(self, ranks: Mapping[str, Iterable[int]]) -> Profile:
        """Measure the error of every layer at each of its ranks. Raises `ValueError` if one is NaN or infinite."""
        lacking = [{rank for rank in ranks[name] if rank not in self.known[name]} for name in ranks]
        if any(lacking):
            self._add({name: sorted(each) for name, each in zip(ranks, lacking, strict=True)})
        return {name: {rank: self.known[name][rank] for rank in ranks[name]} for name in ranks}

    def _add(self, ranks: Mapping[str, list[int]]) -> None:
        """Measure errors and save them."""
        memory = self.problem.prepared.execution.memory
        totals, num_samples = within_memory(partial(self._measure, ranks), memory.halve_batches)
        if not num_samples:
            raise ValueError("the sensitivity data is empty: it must yield at least one (inputs, targets) batch")
        errors = iter((totals / num_samples).tolist())
        for name in ranks:
            measured: dict[int | None, float] = dict(zip(ranks[name], errors, strict=False))
            if bad := [rank for rank, error in measured.items() if not math.isfinite(error)]:
                raise ValueError(f"the error of the network with layer {name} at rank {bad} is NaN or infinite")
            self.known[name].update(measured)
        if cache := self.problem.cache:
            known = {name: list(table.items()) for name, table in self.known.items() if table}
            cache.save(self.file, {name: torch.tensor(each, dtype=torch.float64) for name, each in known.items()})

    def _measure(self, ranks: Mapping[str, list[int]], num_parts: int) -> tuple[Tensor, int]:
        """Sum the errors of all layers and ranks, in their order, and count the samples."""
        prepared, device = self.problem.prepared, self.problem.device
        network, execution = prepared.rewritten, prepared.execution
        total = length_hint(self.batches) * num_parts * len(ranks) or None
        sums, num_samples = torch.zeros(sum(map(len, ranks.values())), dtype=torch.float64), torch.zeros(1).long()
        with (
            torch.no_grad(),
            evaluating(network),
            autocast(device, execution.precision),
            self._reading(network) as read,
            progress_of("sensitivity") as show,
        ):
            for number, batch in enumerate(self.batches):
                for part, (inputs, targets) in enumerate(in_parts(batch, num_parts)):
                    num_samples += batch_size(inputs)
                    prefix = Prefix(network, to_device(inputs, device))
                    expected = to_device(targets, device) if self.of == "loss" else read(prefix.outputs)
                    errors: list[float] = []
                    for place, name in enumerate(ranks):
                        show((number * num_parts + part) * len(ranks) + place, total)
                        errors += self._errors(prefix, name, ranks[name], expected, read)
                    sums += torch.tensor(errors, dtype=torch.float64)
        return sums, int(num_samples)

    def _errors(
        self, prefix: Prefix, name: str, ranks: Iterable[int], expected: Any, read: Callable[[Any], Any]
    ) -> Iterator[float]:
        """Yield the error at each rank, summed over one batch, from `expected` outputs or labels."""
        linears = self.problem.parts[name].linears
        rerun = prefix.before(linears)
        for rank in ranks:
            forwards = {linear: self._truncated(linear, rank).forward for linear in linears}
            outputs = read(rerun(forwards))
            given = (outputs, expected) if self.of == "loss" else (expected, outputs)
            yield self.error(*given).item()

    def _truncated(self, linear: str, rank: int) -> LowRankLayer:
        prepared = self.problem.prepared
        return prepared.part_of[linear].truncated(prepared.linears[linear], self.problem.decompositions[linear], rank)

    @contextmanager
    def _reading(self, model: nn.Module) -> Iterator[Callable[[Any], Any]]:
        """Yield a function that maps the outputs just computed to the values to compare."""
        if self.of != "features":
            yield lambda outputs: outputs
            return
        seen: dict[str, Tensor] = {}  # the inputs of the last linear layer that ran
        linears = (module for module in model.modules() if isinstance(module, nn.Linear))
        with hooked(before=((linear, lambda _, args, kwargs: seen.update(features=args[0])) for linear in linears)):
            yield lambda outputs: seen["features"].clone()
