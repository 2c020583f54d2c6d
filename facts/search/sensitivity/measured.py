"""Sensitivity: how much the network's output suffers when one layer is compressed (paper, section 4.3, stage 1)."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from facts.modules.lowrank import LowRankLinear
from facts.modules.modes import autocast, evaluating
from facts.moments.losses import squared_error
from facts.moments.memory import within_memory
from facts.search.base import Profile
from facts.search.problem import AllocationProblem
from facts.search.sensitivity.prefix import Prefix
from facts.utils.batches import batch_size, in_parts, shared, to_device
from facts.utils.cache import calibration_key, content_key, name_of


class Sensitivity:
    """Errors of the network with one layer at one rank: measured at first use, kept in the problem's cache.

    The error is the problem's own (`of="output"`), or the relative squared error of the inputs of the last linear layer
    (`of="features"`, as in FLAR-SVD), in both cases the mean over samples. Layers before the changed one are computed
    once, and one decomposition serves all ranks.
    """

    def __init__(self, problem: AllocationProblem, of: str = "output"):
        self.problem, self.of, self.batches = problem, of, problem.sensitivity_batches()
        error = problem.output_error if of == "output" else squared_error
        self.error, self.file = error, ""
        if problem.cache:
            key = content_key(calibration_key(self.batches), name_of(error, "output_error"))
            self.file = f"sensitivity-{of}-{key}"
        self.known = self._load()
        self.saved_seconds = 0.0
        self.used: Profile = defaultdict(dict)

    def profile(self, ranks: Mapping[str, Iterable[int]]) -> Profile:
        """Measure the error of every layer at each of its ranks. Raises `ValueError` if one is NaN or infinite."""
        lacking = [{rank for rank in ranks[name] if rank not in self.known[name]} for name in ranks]
        missing = {name: sorted(each) for name, each in zip(ranks, lacking, strict=True)}
        if any(missing.values()):
            self._add(missing)
        profile: Profile = {name: {rank: self.known[name][rank][0] for rank in ranks[name]} for name in ranks}
        for name, errors in profile.items():
            fresh = {rank for rank in ranks[name] if rank not in self.used[name]} - set(missing[name])
            self.saved_seconds += sum(self.known[name][rank][1] for rank in fresh)
            self.used[name].update(errors)
        return profile

    def _add(self, ranks: Mapping[str, list[int]]) -> None:
        """Measure errors and save them."""
        totals, num_samples = within_memory(partial(self._measure, ranks), self.problem.memory)
        if not num_samples:
            raise ValueError("the sensitivity data is empty: it must yield at least one (inputs, targets) batch")
        for name, sums in totals.items():
            measured = {rank: (error / num_samples, seconds) for rank, (error, seconds) in sums.items()}
            if bad := [rank for rank, (error, _) in measured.items() if not math.isfinite(error)]:
                raise ValueError(f"the error of the network with layer {name} at rank {bad} is NaN or infinite")
            self.known[name].update(measured)
        self._save()

    def _measure(self, ranks: Mapping[str, list[int]], num_parts: int) -> tuple[dict[str, dict], int]:
        """Summed error and seconds by layer and rank, and the number of samples, over all processes."""
        model, device = self.problem.model, next(self.problem.model.parameters()).device
        places = {entry: i for i, entry in enumerate((name, rank) for name in ranks for rank in ranks[name])}
        sums, num_samples = torch.zeros(len(places), 2, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
        with torch.no_grad(), evaluating(model), autocast(device, self.problem.precision), self._reading(model) as read:
            for batch in shared(self.batches, "sensitivity", [sums, num_samples]):
                for inputs, _ in in_parts(batch, num_parts):
                    num_samples += batch_size(inputs)
                    start = time.perf_counter()
                    prefix = Prefix(model, to_device(inputs, device))
                    original = read(prefix.outputs)
                    sums[:, 1] += (time.perf_counter() - start) / len(places)
                    for name in ranks:
                        for rank, *measured in self._errors(prefix, name, ranks[name], original, read):
                            sums[places[name, rank]] += torch.tensor(measured, dtype=torch.float64)
        totals = {name: {rank: sums[places[name, rank]].tolist() for rank in ranks[name]} for name in ranks}
        return totals, int(num_samples)

    def _errors(
        self, prefix: Prefix, name: str, ranks: Iterable[int], original: Any, read: Callable[[Any], Any]
    ) -> Iterator[tuple[int, float, float]]:
        """Rank, summed error on one batch, and its seconds."""
        dense = self.problem.layers[name]
        with prefix.before(name) as run:
            for rank in ranks:
                start = time.perf_counter()
                decomposition = self.problem.decompositions[name]
                left, right = (factor.to(dense.weight) for factor in decomposition.truncate(rank))
                small = LowRankLinear(left, right, decomposition.bias(dense, rank))
                error = self.error(original, read(run(small.forward))).item()
                yield rank, error, time.perf_counter() - start

    @contextmanager
    def _reading(self, model: nn.Module) -> Iterator[Callable[[Any], Any]]:
        """A function from the outputs just computed to the values to compare."""
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

    def _load(self) -> dict[str, dict[int, tuple[float, float]]]:
        """Error and measurement time in seconds, by layer and rank."""
        known: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
        tensors = (self.problem.cache and self.problem.cache.load(self.file)) or {}
        for name, table in tensors.items():
            known[name] = {int(rank): (error, seconds) for rank, error, seconds in table.tolist()}
        return known

    def _save(self) -> None:
        if self.problem.cache:
            tables = {
                name: torch.tensor([(rank, *entry) for rank, entry in errors.items()], dtype=torch.float64)
                for name, errors in self.known.items()
                if errors
            }
            self.problem.cache.save(self.file, tables)
