"""ComCat: a Gumbel-softmax over ranks, trained by gradient descent (Xiao et al., 2023)."""

import time
from collections.abc import Iterable
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from facts.modules.modes import autocast, frozen, replaced_forwards
from facts.modules.networks import run
from facts.search.base import Ratios, SearchResult
from facts.search.milp_search import MILPSearch
from facts.search.problem import AllocationProblem
from facts.utils import distributed
from facts.utils.batches import batch_size, to_device
from facts.utils.cache import calibration_key, content_key
from facts.utils.progress import with_progress
from facts.utils.sources import code_of

Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class ComCatSearch(MILPSearch):
    """Every layer is a mixture of its low-rank forms at some `ratios` and of itself; the mixtures are trained.

    The loss is the task's loss, times (cost / budget)^`penalty` if the expected cost lies above the budget. The
    temperature falls from the first of `temperatures` to the second, one step an epoch of the calibration data. The
    plan is the most probable one within the budget, which the solver finds (the original takes each layer's most
    probable choice, and may exceed the budget). The cache keeps the training after each epoch.
    """

    ratios: Ratios = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    num_epochs: Annotated[int, Field(ge=1)] = 30
    learning_rate: Positive = 0.01
    temperatures: tuple[Positive, Positive] = (5.0, 0.1)
    penalty: Positive = 1.5
    seed: Annotated[int, Field(ge=0)] = 0

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        if problem.calibration is None:
            raise ValueError("the search comcat trains on calibration data: give some")
        ranks = problem.ranks_of_ratios(self.ratios)
        mixtures = {name: _Mixture(problem, name, ranks[name]) for name in problem.layers}
        saved_seconds = self._train(problem, problem.calibration, mixtures)
        surprises = {
            name: dict(zip([*ranks[name], None], (-mixture.logits.detach().log_softmax(0)).tolist(), strict=True))
            for name, mixture in mixtures.items()
        }
        plan, solution = self.solve(problem, surprises)
        return SearchResult(plan, solution, saved_seconds=saved_seconds)

    def _train(
        self, problem: AllocationProblem, calibration: Iterable[tuple[Any, Any]], mixtures: dict[str, "_Mixture"]
    ) -> float:
        """Train from where the cache has it; return the seconds that this has saved."""
        start = time.perf_counter()
        device = next(problem.model.parameters()).device
        training = _Training(self, [mixture.logits for mixture in mixtures.values()])
        if problem.cache:
            setting = type(problem.form).__name__, dict(problem.bounds), problem.precision, code_of(type(self))
            file = f"comcat-{content_key(self, calibration_key(calibration), setting)}"
            if tensors := problem.cache.load(file):
                training.restore(tensors)
        saved_seconds = training.seconds
        budget = torch.tensor(problem.budget, dtype=torch.float32, device=device)
        first, last = self.temperatures
        with frozen(problem.model), replaced_forwards({m.dense: m.forward for m in mixtures.values()}):
            for epoch in with_progress(range(training.num_epochs, self.num_epochs), "ComCat"):
                temperature = first * (last / first) ** (epoch / max(1, self.num_epochs - 1))
                for batch in calibration:
                    inputs, targets = to_device(batch, device)
                    cost = sum(mixture.draw(temperature, training.generator) for mixture in mixtures.values())
                    with autocast(device, problem.precision):
                        loss = problem.loss(run(problem.model, inputs), targets) / batch_size(inputs)
                    loss = loss * (cost / budget).max().clamp(min=1) ** self.penalty
                    training.optimizer.zero_grad()
                    loss.backward()
                    training.optimizer.step()
                training.num_epochs, training.seconds = epoch + 1, saved_seconds + time.perf_counter() - start
                if problem.cache and distributed.is_main_rank():
                    problem.cache.save(file, training.tensors())
        return saved_seconds


class _Training:
    """State of a training after some epochs."""

    def __init__(self, search: ComCatSearch, logits: list[Tensor]):
        self.logits, self.num_epochs, self.seconds = logits, 0, 0.0
        self.generator = torch.Generator().manual_seed(search.seed)
        self.optimizer = torch.optim.AdamW(logits, lr=search.learning_rate, weight_decay=5e-4)

    def tensors(self) -> dict[str, Tensor]:
        tensors = {
            f"{index}/{name}": value
            for index, values in self.optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }
        tensors |= {f"{index}/logits": logits.detach() for index, logits in enumerate(self.logits)}
        done = torch.tensor([self.num_epochs, self.seconds], dtype=torch.float64)
        return {**tensors, "generator": self.generator.get_state(), "done": done}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        state: dict[int, dict[str, Tensor]] = {index: {} for index in range(len(self.logits))}
        for key in tensors.keys() - {"generator", "done"}:
            index, name = key.split("/")
            state[int(index)][name] = tensors[key]
        for logits, values in zip(self.logits, state.values(), strict=True):
            logits.data.copy_(values.pop("logits"))
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.generator.set_state(tensors["generator"])
        self.num_epochs, self.seconds = int(tensors["done"][0]), tensors["done"][1].item()


class _Mixture:
    """One layer as a weighted sum of its choices: the low-rank forms in ascending order, and itself."""

    def __init__(self, problem: AllocationProblem, name: str, ranks: list[int]):
        self.dense: nn.Linear = problem.layers[name]
        weight = self.dense.weight
        decomposition = problem.decompositions[name]
        self.left, self.right = (factor.to(weight) for factor in decomposition.truncate(max(ranks)))
        mean = weight.new_zeros(weight.shape[1]) if decomposition.mean is None else decomposition.mean.to(weight)
        self.mean, self.output_of_mean = mean, nn.functional.linear(mean, weight.detach())  # which low-rank forms keep
        self.logits = torch.zeros(len(ranks) + 1, device=weight.device, requires_grad=True)
        costs = [problem.cost(name, rank) for rank in [*ranks, None]]
        self.costs = torch.tensor(costs, dtype=torch.float32, device=weight.device)
        # masks[choice, component]: whether a low-rank choice has the component
        self.masks = (torch.arange(max(ranks)) < torch.tensor(ranks)[:, None]).to(weight)
        self.shares = self.logits

    def draw(self, temperature: float, generator: torch.Generator) -> Tensor:
        """Draw new shares of the choices; return their cost `[bounds]`."""
        noise = -torch.empty(len(self.logits)).exponential_(generator=generator).log()
        self.shares = ((self.logits + noise.to(self.logits)) / temperature).softmax(dim=0)
        return self.shares @ self.costs

    def forward(self, x: Tensor) -> Tensor:
        shares = self.shares.to(self.masks)
        components = shares[:-1] @ self.masks
        dense = nn.functional.linear(x, self.dense.weight) * shares[-1]
        small = nn.functional.linear(nn.functional.linear(x - self.mean, self.right) * components, self.left)
        small = small + shares[:-1].sum() * self.output_of_mean
        return dense + small if self.dense.bias is None else dense + small + self.dense.bias
