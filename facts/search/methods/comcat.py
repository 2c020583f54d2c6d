"""ComCat: a Gumbel-softmax over ranks, trained by gradient descent (Xiao et al., 2023)."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from facts.calibration.data import Batch
from facts.search.base import AllocationProblem, Ratios, SearchResult
from facts.search.token_program import MILPSearch
from facts.search.training import TrainedLayer, Training, current_loss
from facts.utils.options import Count, Positive, Seed, options


@options
class ComCatSearch(MILPSearch):
    """Mix each part's low-rank forms at several `ratios` with its dense form; only the mixing shares are trained.

    The loss is the task loss, times (cost / budget)^`penalty` if the expected cost exceeds the budget. The temperature
    falls from the first of `temperatures` to the second, epoch by epoch. The solver finds the most probable plan within
    the budget (the published method takes each layer's most probable choice, and may exceed the budget).
    """

    ratios: Ratios = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    num_epochs: Count = 30
    learning_rate: Positive = 0.01
    temperatures: tuple[Positive, Positive] = (5.0, 0.1)
    penalty: Positive = 1.5
    seed: Seed = 0

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        ranks = problem.ranks_of_ratios(self.ratios)
        mixtures = {name: Mixture(problem, name, ranks[name]) for name in problem.parts}
        logits = [mixture.logits for mixture in mixtures.values()]
        optimizer = torch.optim.AdamW(logits, lr=self.learning_rate, weight_decay=5e-4)
        training = Training(optimizer, self.num_epochs, seed=self.seed)
        budget = torch.tensor(problem.budget, dtype=torch.float32, device=logits[0].device)
        first, last = self.temperatures

        def loss_at(epoch: int, batch: Batch) -> Tensor:
            temperature = first * (last / first) ** (epoch / max(1, self.num_epochs - 1))
            cost = sum(mixture.draw(temperature, training.generator) for mixture in mixtures.values())
            return current_loss(problem.prepared, batch) * (cost / budget).max().clamp(min=1) ** self.penalty

        forwards = {call: forward for mixture in mixtures.values() for call, forward in mixture.forwards().items()}
        training.run(problem, self, forwards, loss_at)
        surprises = {
            name: dict(zip([*ranks[name], None], (-mixture.logits.detach().log_softmax(0)).tolist(), strict=True))
            for name, mixture in mixtures.items()
        }
        return SearchResult(*self.best_plan(problem, surprises))


class Mixture:
    """One part as a weighted sum of its low ranks, in ascending order, and itself; its calls have the same shares."""

    def __init__(self, problem: AllocationProblem, name: str, ranks: list[int]):
        self.layers = [TrainedLayer(problem, linear, max(ranks)) for linear in problem.parts[name].linears]
        weight = self.layers[0].dense.weight
        self.logits = torch.zeros(len(ranks) + 1, device=weight.device, requires_grad=True)
        costs = [problem.cost(name, rank) for rank in [*ranks, None]]
        self.costs = torch.tensor(costs, dtype=torch.float32, device=weight.device)
        # masks[choice, component]: whether a low-rank choice keeps the component
        self.masks = (torch.arange(max(ranks)) < torch.tensor(ranks)[:, None]).to(weight)
        self.shares = self.logits

    def draw(self, temperature: float, generator: torch.Generator) -> Tensor:
        """Draw new shares of the choices; return their cost `[bounds]`."""
        noise = -torch.empty(len(self.logits)).exponential_(generator=generator).log()
        self.shares = ((self.logits + noise.to(self.logits)) / temperature).softmax(dim=0)
        return self.shares @ self.costs

    def forwards(self) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
        return {layer.dense: partial(self.forward, layer) for layer in self.layers}

    def forward(self, layer: TrainedLayer, x: Tensor) -> Tensor:
        shares = self.shares.to(self.masks)
        return layer.outputs(x, shares[-1] * layer.dense.weight + layer.weight(shares[:-1] @ self.masks))
