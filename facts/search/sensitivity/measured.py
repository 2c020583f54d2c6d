"""Sensitivity: how much the network's output suffers when one layer is compressed (paper, section 4.3, stage 1)."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from facts.modules.lowrank import LowRankLayer
from facts.modules.modes import autocast, evaluating, replaced_forwards
from facts.modules.networks import run
from facts.moments.data_pass import within_memory
from facts.moments.losses import OutputError, squared_error
from facts.search.base import Profile
from facts.search.problem import AllocationProblem
from facts.search.sensitivity.prefix import Prefix
from facts.utils.batches import batch_size, in_parts, to_device
from facts.utils.cache import calibration_key, content_key, name_of
from facts.utils.progress import with_progress


class Sensitivity:
    """Errors of the network with one layer at one rank, measured at first use and kept in the problem's cache.

    Each is a mean over samples: of the calibration's output error (`of="output"`), or of an `error` of the last linear
    layer's inputs (`of="features"`), by default the relative squared error, as in FLAR-SVD.
    """

    def __init__(self, problem: AllocationProblem, of: str = "output", error: OutputError = squared_error):
        self.problem, self.of, self.batches = problem, of, problem.sensitivity_batches()
        self.error = problem.calibration.output_error if of == "output" else error
        self.known: Profile = defaultdict(dict)
        if problem.cache:
            key = content_key(calibration_key(self.batches), name_of(self.error, "output_error"))
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
        memory = self.problem.calibration.execution.memory
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
        calibration, device = self.problem.calibration, self.problem.device
        network, execution = calibration.rewritten, calibration.execution
        sums, num_samples = torch.zeros(sum(map(len, ranks.values())), dtype=torch.float64), torch.zeros(1).long()
        with (
            torch.no_grad(),
            evaluating(network),
            autocast(device, execution.precision),
            self._reading(network) as read,
        ):
            for batch in with_progress(self.batches, "sensitivity"):
                for inputs, _ in in_parts(batch, num_parts):
                    num_samples += batch_size(inputs)
                    prefix = Prefix(network, to_device(inputs, device))
                    original = read(prefix.outputs)
                    errors = (self._errors(prefix, name, ranks[name], original, read) for name in ranks)
                    sums += torch.tensor([*chain.from_iterable(errors)], dtype=torch.float64)
        return sums, int(num_samples)

    @torch.no_grad()
    def of_plan(self, plan: Mapping[str, int]) -> float:
        """Measure the error of the network with all layers at their ranks in the plan."""
        calibration = self.problem.calibration
        network, precision = calibration.rewritten, calibration.execution.precision
        ranks = {linear: rank for name, rank in plan.items() for linear in self.problem.parts[name].linears}
        forwards: dict[nn.Module, Callable] = {
            calibration.linears[name]: self._truncated(name, rank).forward for name, rank in ranks.items()
        }
        total = torch.zeros(2, dtype=torch.float64)
        with evaluating(network), autocast(self.problem.device, precision), self._reading(network) as read:
            for inputs, _ in with_progress(self.batches, "sensitivity"):
                inputs = to_device(inputs, self.problem.device)
                original = read(run(network, inputs))
                with replaced_forwards(forwards):
                    error = self.error(original, read(run(network, inputs)))
                total += torch.tensor([error.item(), batch_size(inputs)])
        return (total[0] / total[1]).item()

    def _errors(
        self, prefix: Prefix, name: str, ranks: Iterable[int], original: Any, read: Callable[[Any], Any]
    ) -> Iterator[float]:
        """Yield the error at each rank, summed over one batch."""
        linears = self.problem.parts[name].linears
        with prefix.before(linears) as rerun:
            for rank in ranks:
                forwards = {linear: self._truncated(linear, rank).forward for linear in linears}
                yield self.error(original, read(rerun(forwards))).item()

    def _truncated(self, linear: str, rank: int) -> LowRankLayer:
        calibration = self.problem.calibration
        return calibration.part_of[linear].truncated(
            calibration.linears[linear], self.problem.decompositions[linear], rank
        )

    @contextmanager
    def _reading(self, model: nn.Module) -> Iterator[Callable[[Any], Any]]:
        """Yield a function that maps the outputs just computed to the values to compare."""
        if self.of == "output":
            yield lambda outputs: outputs
            return
        seen: dict[str, Tensor] = {}  # the inputs of the last linear layer that ran
        with ExitStack() as stack:
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    hook = module.register_forward_pre_hook(lambda module, args: seen.update(features=args[0]))
                    stack.callback(hook.remove)
            yield lambda outputs: seen["features"].clone()
