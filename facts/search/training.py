"""Searches that train by gradient descent on calibration data, epoch by epoch."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from facts.modules.modes import autocast, frozen, replaced_forwards
from facts.modules.networks import run
from facts.search.base import Search
from facts.search.milp_search import MILPSearch
from facts.search.problem import AllocationProblem
from facts.utils.batches import batch_size, to_device
from facts.utils.cache import calibration_key, content_key
from facts.utils.options import Positive, options
from facts.utils.progress import with_progress
from facts.utils.sources import code_of


class Training:
    """State of a training: parameters and their optimizer, random draws, and what has been done so far.

    `saved_seconds` are those of the epochs that the cache had.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, seed: int = 0):
        self.optimizer = optimizer
        (group,) = optimizer.param_groups
        self.parameters: list[Tensor] = group["params"]
        self.generator = torch.Generator().manual_seed(seed)
        self.num_epochs, self.seconds, self.saved_seconds = 0, 0.0, 0.0

    def epochs(self, problem: AllocationProblem, search: Search, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs that the problem's cache does not have; save the state after each."""
        start, method, file = time.perf_counter(), type(search).__name__, ""
        if problem.cache:
            setting = type(problem.form).__name__, dict(problem.bounds), problem.precision, code_of(type(search))
            file = f"{method}-{content_key(search, calibration_key(calibration_data(problem, search)), setting)}"
            if tensors := problem.cache.load(file):
                self.restore(tensors)
        self.saved_seconds = self.seconds
        for epoch in with_progress(range(self.num_epochs, total), method):
            yield epoch
            self.num_epochs, self.seconds = epoch + 1, self.saved_seconds + time.perf_counter() - start
            if problem.cache:
                problem.cache.save(file, self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        tensors = {
            f"{index}/{name}": value
            for index, values in self.optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }
        tensors |= {f"{index}/value": parameter.detach() for index, parameter in enumerate(self.parameters)}
        done = torch.tensor([self.num_epochs, self.seconds], dtype=torch.float64)
        return {**tensors, "generator": self.generator.get_state(), "done": done}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        state: dict[int, dict[str, Tensor]] = {index: {} for index in range(len(self.parameters))}
        for key in tensors.keys() - {"generator", "done"}:
            index, name = key.split("/")
            state[int(index)][name] = tensors[key]
        for parameter, values in zip(self.parameters, state.values(), strict=True):
            parameter.data.copy_(values.pop("value"))
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.generator.set_state(tensors["generator"])
        self.num_epochs, self.seconds = int(tensors["done"][0]), tensors["done"][1].item()


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
"""From an epoch's number and the task's loss on a batch, to be run once, to the loss to minimise."""


@options
class TrainedSearch(MILPSearch):
    """Choices are trained for `num_epochs` of the calibration data; the weights are not.

    The cache keeps the training after each epoch.
    """

    num_epochs: Annotated[int, Field(ge=1)]
    learning_rate: Positive
    seed: Annotated[int, Field(ge=0)] = 0

    def train(
        self,
        problem: AllocationProblem,
        training: Training,
        layers: Iterable[TrainedLayer],
        objective: Objective,
    ) -> float:
        """Train these layers, from where the cache has it; return the seconds that this has saved.

        Raises `ValueError` without calibration data.
        """
        calibration = calibration_data(problem, self)
        device = next(problem.model.parameters()).device
        forwards: dict[nn.Module, Callable] = {layer.dense: layer.forward for layer in layers}
        with frozen(problem.model), replaced_forwards(forwards):
            for epoch in training.epochs(problem, self, self.num_epochs):
                for batch in calibration:
                    loss = objective(epoch, partial(task_loss, problem, *to_device(batch, device)))
                    training.optimizer.zero_grad()
                    loss.backward()
                    training.optimizer.step()
        return training.saved_seconds


def calibration_data(problem: AllocationProblem, search: Search) -> Iterable[tuple[Any, Any]]:
    """The data to train on. Raises `ValueError` if there are none."""
    if problem.calibration is None:
        raise ValueError(f"the search {type(search).__name__} trains on calibration data: give some")
    return problem.calibration


def task_loss(problem: AllocationProblem, inputs: Any, targets: Any) -> Tensor:
    """The mean over samples of the loss of the network as it is."""
    with autocast(next(problem.model.parameters()).device, problem.precision):
        return problem.loss(run(problem.model, inputs), targets) / batch_size(inputs)
