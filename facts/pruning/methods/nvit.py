"""NViT: latency-aware iterative pruning (Yang et al., 2023)."""

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from facts.pruning.base import Pruner, PruningProblem, removal_order
from facts.pruning.block_times import BlockTimes
from facts.pruning.vit import check_vit
from facts.pruning.widths import NarrowAttention, Width, importance, widths_of, without
from facts.utils.batches import batch_size
from facts.utils.options import Count, NotNegative, options
from facts.utils.progress import with_progress


@options
class NViT(Pruner):
    """The least important units, ranked over all widths, are removed in `num_steps` equal steps to the budget.

    Importance is (Σ gradient · weight)² over a unit's parameters, summed over the batches between two steps, minus
    `latency_weight` times the unit's latency in a measured table of block times, each divided by its mean. Before each
    step the weights are trained on `steps_between` batches, with the task's loss and AdamW at `learning_rate`.
    """

    num_steps: Count = 20
    steps_between: Count = 25
    learning_rate: NotNegative = 1e-4
    latency_weight: NotNegative = 0.01

    def narrowed(self, problem: PruningProblem, model: nn.Module) -> nn.Module:
        network = check_vit(model).requires_grad_(True)
        for block in network.blocks:
            block.set_submodule("attn", NarrowAttention(block.attn))
        batches = problem.endless()
        times = BlockTimes(network, batch_size(next(iter(problem.batches))[0]), problem.num_tokens)
        for step in with_progress(range(1, self.num_steps + 1), "NViT"):
            widths = widths_of(network)
            scores = self._train(problem, network, widths, islice(batches, self.steps_between))
            order = removal_order(less_latency(scores, times.savings(widths), self.latency_weight))
            most = sum(width.size - 1 for width in widths.values())  # each width keeps one unit
            target = problem.dense - (problem.dense - problem.budget) * step // self.num_steps
            network = problem.first_fit(partial(_without_first, network, widths, order), most, target)
        return network

    def _train(
        self,
        problem: PruningProblem,
        model: VisionTransformer,
        widths: Mapping[str, Width],
        batches: Iterable[tuple[Any, Any]],
    ) -> dict[str, Tensor]:
        """Train the model in place; return the sum of each unit's importance over the batches."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.learning_rate)
        scores = {name: torch.zeros(width.size) for name, width in widths.items()}
        for batch in batches:
            optimizer.zero_grad()
            problem.mean_loss(model, batch).backward()
            for name, score in importance(model, widths).items():
                scores[name] += score.cpu()
            optimizer.step()
        model.zero_grad()
        return scores


def less_latency(scores: Mapping[str, Tensor], savings: Mapping[str, float], weight: float) -> dict[str, Tensor]:
    """Importance minus `weight` times latency, each divided by its mean over all units."""
    importance = torch.cat(list(scores.values()))
    latency = torch.cat([torch.full_like(score, savings[name]) for name, score in scores.items()])
    tiny = torch.finfo(importance.dtype).tiny
    regularised = importance / importance.mean().clamp(min=tiny) - weight * latency / latency.mean().clamp(min=tiny)
    return dict(zip(scores, regularised.split([len(score) for score in scores.values()]), strict=True))


def _without_first(
    model: VisionTransformer, widths: Mapping[str, Width], order: Mapping[str, Tensor], amount: int
) -> VisionTransformer:
    return without(model, widths, {name: places >= amount for name, places in order.items()})
