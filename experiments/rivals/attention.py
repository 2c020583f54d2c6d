"""Searches for units with rules of their own, and statistics of attention's inputs in the features of its cores."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from facts.decomposition.truncation import Decomposition
from facts.modules.lowrank import LinearLayer
from facts.modules.modes import evaluating
from facts.modules.networks import run
from facts.moments import InputGram
from facts.parts.attention import HeadsUnit, ScoreUnit, output_cores, score_cores
from facts.parts.base import Part
from facts.search import AllocationProblem, Search
from facts.utils.batches import shared, to_device


class UnitSearch(Search):
    """A search that decomposes units by a rule of its own; layers outside units keep their decompositions."""

    @abstractmethod
    def decomposed(self, unit: Part, layer: LinearLayer, gram: Tensor, other: Tensor | None) -> Decomposition:
        """Decompose a call of a unit, given E[x xᵀ] `[n, n]` of its inputs and that of attention's keys or values."""

    def decompositions(self, problem: AllocationProblem) -> dict[str, Decomposition]:
        moments, made = problem.calibration.moments((InputGram(),)), dict(problem.decompositions)
        others = key_and_value_grams(problem)
        for unit in problem.calibration.units.values():
            for call in unit.linears:
                layer = problem.calibration.linears[call]
                gram = moments[call][InputGram()][0].double() / moments[call].num_tokens
                gram = gram[: layer.in_features, : layer.in_features]  # without the 1 appended for a bias
                made[call] = self.decomposed(unit, layer, gram, others.get(call))
        return made


def key_and_value_grams(problem: AllocationProblem) -> dict[str, Tensor]:
    """Compute E[y yᵀ] `[d, d]` in float64 for each call of an attention unit: y are a token's keys or values.

    Raises `ValueError` if there is no such unit.
    """
    units = [unit for unit in problem.calibration.units.values() if isinstance(unit, HeadsUnit)]
    if not units:
        raise ValueError("this search narrows the units of attention: choose parts=units, or another search")
    projections = {unit.owner: unit.heads(problem.model) for unit in units}
    sizes = {owner: heads.queries.shape[-1] for owner, (_, heads) in projections.items()}
    sums = {owner: torch.zeros(size + 1, size, device=problem.device) for owner, size in sizes.items()}

    def add(owner: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        x = inputs[0].flatten(0, -2).to(sums[owner])
        sums[owner][:-1].addmm_(x.T, x)
        sums[owner][-1] += len(x)

    run_with_hooks(problem, {module: partial(add, owner) for owner, (module, _) in projections.items()}, sums.values())
    grams: dict[str, Tensor] = {}
    for unit in units:
        heads, summed = projections[unit.owner][1], sums[unit.owner].double()
        bases = score_cores(heads)[0].keys if isinstance(unit, ScoreUnit) else output_cores(heads)[0].values
        gram = bases.double() @ (summed[:-1] / summed[-1]) @ bases.double().mT
        grams |= dict(zip(unit.linears, gram, strict=True))
    return grams


@torch.no_grad()
def run_with_hooks(problem: AllocationProblem, hooks: Mapping[nn.Module, Callable], sums: Iterable[Tensor]) -> None:
    """Run the network on the calibration data with a hook before each module; add up `sums` over processes."""
    with ExitStack() as stack, evaluating(problem.model):
        for module, hook in hooks.items():
            stack.enter_context(module.register_forward_pre_hook(hook))
        for inputs, _ in shared(problem.training_batches(), sums=sums):
            run(problem.model, to_device(inputs, problem.device))
