"""Searches that train by gradient descent on calibration data, epoch by epoch."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from facts.calibration.data import Batch
from facts.calibration.prepared_model import PreparedModel
from facts.modules.networks import autocast, frozen, replaced_forwards, run
from facts.moments.losses import on_given_labels
from facts.search.base import AllocationProblem, Search
from facts.utils.batches import batch_size, to_device
from facts.utils.cache import calibration_key, code_of, content_key, optimizer_tensors, restore_optimizer
from facts.utils.progress import with_progress


class Training:
    """State of a training run: an optimizer, a random generator, and the number of epochs done.

    The learning rate falls to `last_rate` along a cosine, epoch by epoch; `clip` bounds the gradient's norm.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        num_epochs: int,
        *,
        seed: int = 0,
        last_rate: float | None = None,
        clip: float = math.inf,
    ):
        self.optimizer, self.num_epochs, self.clip = optimizer, num_epochs, clip
        (self.group,) = optimizer.param_groups
        self.first_rate = self.group["lr"]
        self.last_rate = self.first_rate if last_rate is None else last_rate
        self.parameters: list[Tensor] = self.group["params"]
        self.generator = torch.Generator().manual_seed(seed)
        self.done = 0

    def run(
        self,
        problem: AllocationProblem,
        search: Search,
        forwards: Mapping[nn.Module, Callable[[Tensor], Tensor]],
        loss_at: Callable[[int, Batch], Tensor],
    ) -> None:
        """Minimise `loss_at(epoch, batch)` of the network with other forward functions, resuming from the cache."""
        batches = problem.training_batches()
        with frozen(problem.prepared.rewritten), replaced_forwards(forwards):
            for epoch in self._epochs(problem, search):
                falling = (self.first_rate - self.last_rate) * (1 + math.cos(math.pi * epoch / self.num_epochs)) / 2
                self.group["lr"] = self.last_rate + falling
                for batch in batches:
                    loss = loss_at(epoch, batch)
                    self.optimizer.zero_grad()
                    if loss.requires_grad:
                        loss.backward()
                        if self.clip < math.inf:
                            nn.utils.clip_grad_norm_(self.parameters, self.clip)
                        self.optimizer.step()

    def _epochs(self, problem: AllocationProblem, search: Search) -> Iterator[int]:
        """Yield the numbers of the epochs that are not in the problem's cache, and save the state after each."""
        method, file = type(search).__name__, ""
        if problem.cache:
            setting = problem.prepared.form.name, dict(problem.bounds), code_of(type(search))
            file = f"{method}-{content_key(search, calibration_key(problem.training_batches()), setting)}"
            if tensors := problem.cache.load(file):
                self.restore(tensors)
        for epoch in with_progress(range(self.done, self.num_epochs), method):
            yield epoch
            self.done = epoch + 1
            if problem.cache:
                problem.cache.save(file, self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        return {
            **optimizer_tensors(self.optimizer),
            **{f"{index}/value": parameter.detach() for index, parameter in enumerate(self.parameters)},
            "generator": self.generator.get_state(),
            "epochs": torch.tensor(self.done),
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        others = dict(tensors)
        self.generator.set_state(others.pop("generator"))
        self.done = int(others.pop("epochs"))
        for index, parameter in enumerate(self.parameters):
            parameter.data.copy_(others.pop(f"{index}/value"))
        restore_optimizer(self.optimizer, others)
        (self.group,) = self.optimizer.param_groups


class TrainedLayer:
    """A layer, or a linear of a unit, whose leading components are multiplied by trained weights."""

    def __init__(self, problem: AllocationProblem, name: str, number: int):
        self.dense = problem.prepared.linears[name]
        weight = self.dense.weight
        decomposition = problem.decompositions[name]
        self.left, self.right = (factor.to(weight) for factor in decomposition.truncate(number))
        self.mean = None if decomposition.mean is None else decomposition.mean.to(weight)

    def weight(self, weights: Tensor) -> Tensor:
        """Sum the components, each multiplied by its entry of `weights [number]`."""
        return (self.left * weights) @ self.right

    def outputs(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute the outputs with another weight, and with the bias that keeps the output of the mean input."""
        bias: Tensor | None = self.dense.bias
        if self.mean is not None and bias is not None:
            bias = bias + (self.dense.weight.detach() - weight) @ self.mean
        if weight.dim() == 2:
            return nn.functional.linear(x, weight, bias)
        return torch.einsum("...hn,hmn->...hm", x, weight)  # heads that share their values, without a bias


def current_outputs(prepared: PreparedModel, inputs: Any) -> Any:
    """Compute the outputs of the rewritten network in its current state."""
    with autocast(prepared.device, prepared.execution.precision):
        return run(prepared.rewritten, to_device(inputs, prepared.device))


def current_loss(prepared: PreparedModel, batch: Batch) -> Tensor:
    """Compute the mean loss over a batch's samples for the rewritten network in its current state."""
    inputs, targets = to_device(batch, prepared.device)
    with autocast(prepared.device, prepared.execution.precision):
        return on_given_labels(prepared.loss)(run(prepared.rewritten, inputs), targets) / batch_size(inputs)
