"""ARS: masks of singular values, trained through a hypernetwork (Gao et al., NAACL 2024)."""

import torch
from torch import Tensor

from facts.calibration.data import Batch
from facts.modules.hypernetwork import rounded, seeded_hypernetwork
from facts.moments.statistics import at_least_tiny
from facts.search import AllocationProblem, SearchResult
from facts.search.base import MILPSearch
from facts.search.training import TrainedLayer, Training, task_loss
from facts.utils.options import Count, NotNegative, Positive, Seed, options


@options
class ARSSearch(MILPSearch):
    """Each layer sums its components times a mask of zeros and ones, which a hypernetwork learns to draw.

    Masks are drawn from a Gumbel-sigmoid at `temperature`, straight-through, and nearly open at first by `offset`. The
    loss is the task's, plus `budget_weight` log(cost / budget) above the budget, plus `alignment_weight` times the mean
    over layers of ‖(mask - aligned) s‖², where the aligned mask has as many ones, all in front, and s are the singular
    values over the largest. The solver finds the plan whose components have the largest sum of logits.
    """

    num_epochs: Count = 8
    learning_rate: Positive = 1e-3
    temperature: Positive = 0.4
    offset: float = 3.0
    budget_weight: NotNegative = 16.0
    alignment_weight: NotNegative = 10.0
    seed: Seed = 0

    def allocate(self, problem: AllocationProblem) -> SearchResult:
        layers = {name: MaskedLayer(problem, name) for name in problem.layers}
        network = seeded_hypernetwork([len(layer.sizes) for layer in layers.values()], self.seed).to(problem.device)
        optimizer = torch.optim.Adam(network.parameters(), lr=self.learning_rate)
        training = Training(optimizer, self.num_epochs, seed=self.seed)
        budget = torch.tensor(problem.budget, dtype=torch.float32, device=problem.device)

        def loss_at(epoch: int, batch: Batch) -> Tensor:
            for layer, logits in zip(layers.values(), network(), strict=True):
                layer.mask = self._drawn(logits, training.generator)
            share = sum(layer.cost() for layer in layers.values()) / budget
            misaligned = sum(layer.misalignment() for layer in layers.values()) / len(layers)
            penalty = self.budget_weight * share.max().clamp(min=1).log() + self.alignment_weight * misaligned
            return task_loss(problem, batch) + penalty

        training.run(problem, self, {layer.dense: layer.forward for layer in layers.values()}, loss_at)
        with torch.no_grad():
            logits = dict(zip(layers, network(), strict=True))
        errors = {name: self._errors(logits[name], problem.full_rank(name)) for name in layers}
        return SearchResult(*self.solve(problem, errors))

    def _drawn(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Draw a mask of zeros and ones `[k]`."""
        noise = -torch.empty(len(logits)).exponential_(generator=generator).log()
        return rounded(((logits + noise.to(logits) + self.offset) / self.temperature).sigmoid())

    def _errors(self, logits: Tensor, most: int) -> dict[int | None, float]:
        """Negated sums of the logits of the first 1 to `most` components, and of all (None)."""
        errors = (-(logits + self.offset).double().cumsum(dim=0)).tolist()
        return {**dict(enumerate(errors[:most], start=1)), None: errors[-1]}


class MaskedLayer(TrainedLayer):
    """One layer as all its components times a mask `[k]`; `costs [k, bounds]` are what each adds to those before it."""

    def __init__(self, problem: AllocationProblem, name: str):
        energies = problem.decompositions[name].energies
        super().__init__(problem, name, len(energies))
        device = self.dense.weight.device
        costs = torch.tensor([problem.cost(name, k + 1) for k in range(len(energies))], dtype=torch.float64)
        self.costs = costs.diff(dim=0, prepend=torch.zeros_like(costs[:1])).float().to(device)
        self.sizes = (energies / at_least_tiny(energies[0])).sqrt().float().to(device)
        self.mask = torch.ones_like(self.sizes)

    def cost(self) -> Tensor:
        return self.mask @ self.costs

    def misalignment(self) -> Tensor:
        places = torch.arange(len(self.mask), device=self.mask.device)
        aligned = (places < self.mask.detach().sum().round()).to(self.mask)
        return ((self.mask - aligned) * self.sizes).square().sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(x, self.weight(self.mask.to(self.left)))
