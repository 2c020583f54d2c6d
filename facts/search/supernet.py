"""A network whose layers can take several ranks, all of them leading parts of one pair of factors."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from facts.decomposition.apply import Plan
from facts.decomposition.truncation import Decomposition
from facts.modules.modes import autocast, frozen, replaced_forwards
from facts.modules.networks import run
from facts.search.problem import AllocationProblem
from facts.utils.batches import shared, to_device

Choices = Mapping[str, list[int | None]]
"""Layer name to the ranks on offer in ascending order, then None for dense."""


class Supernet:
    """The problem's network, with `choices` of some layers: ranks, None for dense.

    Factors start as the problem's decompositions and can be trained; all other weights stay as they are.
    """

    def __init__(self, problem: AllocationProblem, choices: Choices):
        self.problem, self.choices = problem, choices
        self.layers = {name: _Elastic(problem, name, max(filter(None, ranks))) for name, ranks in choices.items()}

    def parameters(self) -> list[Tensor]:
        return [factor for layer in self.layers.values() for factor in (layer.left, layer.right)]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the problem's network run as the supernet within the block, in evaluation mode."""
        forwards: dict[nn.Module, Callable] = {layer.dense: layer.forward for layer in self.layers.values()}
        with frozen(self.problem.model), replaced_forwards(forwards):
            yield

    def outputs(self, inputs: Any, plan: Plan) -> Any:
        """The outputs at some ranks; layers that have none are dense."""
        model = self.problem.model
        device = next(model.parameters()).device
        for name, layer in self.layers.items():
            layer.rank = plan.get(name)
        with autocast(device, self.problem.precision):
            return run(model, to_device(inputs, device))

    def errors(self, plans: Iterable[Plan]) -> list[float]:
        """Errors of the outputs at each of the plans, summed over the sensitivity data."""
        plans = list(plans)
        totals = torch.zeros(len(plans), dtype=torch.float64)
        with torch.no_grad(), self.in_place():
            for inputs, _ in shared(self.problem.sensitivity_batches(), sums=[totals]):
                original = self.outputs(inputs, {})
                errors = [self.problem.output_error(original, self.outputs(inputs, plan)).item() for plan in plans]
                totals += torch.tensor(errors, dtype=torch.float64)
        return totals.tolist()

    def decompositions(self) -> dict[str, Decomposition]:
        """Decompositions with the factors of the supernet, as many components as its highest rank."""
        return {
            name: replace(
                self.problem.decompositions[name],
                left=layer.left.detach(),
                right=layer.right.detach(),
                energies=self.problem.decompositions[name].energies[: len(layer.right)],
            )
            for name, layer in self.layers.items()
        }


class _Elastic:
    """One layer at a `rank`, or dense."""

    def __init__(self, problem: AllocationProblem, name: str, highest: int):
        self.dense: nn.Linear = problem.layers[name]
        self.rank: int | None = None
        weight, decomposition = self.dense.weight.detach(), problem.decompositions[name]
        factors = (factor.to(weight.device) for factor in decomposition.truncate(highest))
        self.left, self.right = (factor.detach().clone().requires_grad_() for factor in factors)
        mean = decomposition.mean
        self.mean = weight.new_zeros(weight.shape[1]) if mean is None else mean.to(weight)
        self.offset = nn.functional.linear(self.mean, weight, self.dense.bias).detach()  # which all ranks keep

    def forward(self, x: Tensor) -> Tensor:
        if self.rank is None:
            return nn.functional.linear(x, self.dense.weight, self.dense.bias)
        left, right = self.left[:, : self.rank].to(x), self.right[: self.rank].to(x)
        return nn.functional.linear(nn.functional.linear(x - self.mean.to(x), right), left, self.offset.to(x))
