"""Searches that train by gradient descent on calibration data, epoch by epoch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from facts.modules.modes import autocast, frozen, replaced_forwards
from facts.modules.networks import run
from facts.moments.losses import on_given_labels
from facts.search.base import Search
from facts.search.milp_search import MILPSearch
from facts.search.problem import AllocationProblem
from facts.utils import distributed
from facts.utils.batches import batch_size, to_device
from facts.utils.cache import calibration_key, content_key
from facts.utils.options import Count, Positive, Seed, options
from facts.utils.progress import with_progress
from facts.utils.sources import code_of


class Training:
    """State of a training: parameters and their optimizer, random draws, and the number of epochs done."""

    def __init__(self, optimizer: torch.optim.Optimizer, seed: int = 0):
        self.optimizer = optimizer
        (group,) = optimizer.param_groups
        self.parameters: list[Tensor] = group["params"]
        self.generator = torch.Generator().manual_seed(seed)
        self.num_epochs = 0

    def epochs(self, problem: AllocationProblem, search: Search, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs that the problem's cache does not have; save the state after each."""
        method, file = type(search).__name__, ""
        if problem.cache:
            setting = type(problem.form).__name__, dict(problem.bounds), code_of(type(search))
            file = f"{method}-{content_key(search, calibration_key(problem.training_batches()), setting)}"
            if tensors := problem.cache.load(file):
                self.restore(tensors)
        for epoch in with_progress(range(self.num_epochs, total), method):
            yield epoch
            self.num_epochs = epoch + 1
            if problem.cache and distributed.is_main_rank():
                problem.cache.save(file, self.tensors())

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        tensors = {
            f"{index}/{name}": value
            for index, values in self.optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }
        tensors |= {f"{index}/value": parameter.detach() for index, parameter in enumerate(self.parameters)}
        return {**tensors, "generator": self.generator.get_state(), "epochs": torch.tensor(self.num_epochs)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        state: dict[int, dict[str, Tensor]] = {index: {} for index in range(len(self.parameters))}
        for key in tensors.keys() - {"generator", "epochs"}:
            index, name = key.split("/")
            state[int(index)][name] = tensors[key]
        for parameter, values in zip(self.parameters, state.values(), strict=True):
            parameter.data.copy_(values.pop("value"))
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.generator.set_state(tensors["generator"])
        self.num_epochs = int(tensors["epochs"])


class TrainedLayer(ABC):
    """A layer whose leading components are weighted by what is trained."""

    def __init__(self, problem: AllocationProblem, name: str, number: int):
        self.dense: nn.Linear = problem.layers[name]
        weight = self.dense.weight
        decomposition = problem.decompositions[name]
        self.left, self.right = (factor.to(weight) for factor in decomposition.truncate(number))
        mean = weight.new_zeros(weight.shape[1]) if decomposition.mean is None else decomposition.mean.to(weight)
        self.mean, self.output_of_mean = mean, nn.functional.linear(mean, weight.detach())  # which low-rank forms keep

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """The forward function that takes the dense layer's place."""

    def weighted(self, x: Tensor, weights: Tensor) -> Tensor:
        """Outputs of the components times `weights [number]`, without the bias and the mean's output."""
        return nn.functional.linear(nn.functional.linear(x - self.mean, self.right) * weights, self.left)


Objective = Callable[[int, Callable[[], Tensor]], Tensor]
"""From an epoch's number and the task's loss on a batch, to be computed once, to the loss to minimise."""


@options
class TrainedSearch(MILPSearch):
    """Choices are trained for `num_epochs` of the calibration data; the weights are not.

    The cache keeps the training after each epoch.
    """

    num_epochs: Count
    learning_rate: Positive
    seed: Seed = 0

    def train(
        self, problem: AllocationProblem, training: Training, layers: Iterable[TrainedLayer], objective: Objective
    ) -> None:
        """Train these layers, from where the cache has it. Raises `ValueError` without calibration data."""
        calibration = problem.training_batches()
        forwards: dict[nn.Module, Callable] = {layer.dense: layer.forward for layer in layers}
        with frozen(problem.model), replaced_forwards(forwards):
            for epoch in training.epochs(problem, self, self.num_epochs):
                for batch in calibration:
                    training.step(objective(epoch, partial(task_loss, problem, batch)))


def outputs_of(problem: AllocationProblem, inputs: Any) -> Any:
    """The outputs of the network as it is."""
    with autocast(problem.device, problem.calibration.execution.precision):
        return run(problem.model, to_device(inputs, problem.device))


def task_loss(problem: AllocationProblem, batch: tuple[Any, Any]) -> Tensor:
    """The mean loss over a batch's samples of the network as it is."""
    inputs, targets = to_device(batch, problem.device)
    with autocast(problem.device, problem.calibration.execution.precision):
        loss = on_given_labels(problem.calibration.loss)
        return loss(run(problem.model, inputs), targets) / batch_size(inputs)
