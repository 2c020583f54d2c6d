"""NViT: latency-aware iterative pruning (Yang et al., 2023)."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Annotated, Any

import torch
from pydantic import Field
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from facts.pruning.base import Pruner, PruningProblem
from facts.pruning.block_times import BlockTimes
from facts.pruning.narrow_attention import NarrowAttention
from facts.pruning.ranking import turns_to_go
from facts.pruning.vit import check_vit
from facts.pruning.widths import Width, importance, widths_of, without
from facts.utils.batches import batch_size
from facts.utils.options import Count, options
from facts.utils.progress import with_progress


@options
class NViT(Pruner):
    """Units of least importance, all widths ranked together, are removed in `num_steps` equal steps to the budget.

    Importance is (Σ gradient · weight)² over a unit's parameters, the mean over the batches between two steps, less
    `latency_weight` times the unit's latency in a measured table of block times; both are divided by their mean over
    all units. Between steps the weights are trained on `steps_between` batches, with the task's loss and AdamW at
    `learning_rate`; not after the last step.
    """

    num_steps: Count = 20
    steps_between: Count = 25
    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    latency_weight: Annotated[float, Field(ge=0)] = 0.01

    def narrowed(self, problem: PruningProblem, model: nn.Module) -> nn.Module:
        network = check_vit(model).requires_grad_(True)
        for block in network.blocks:
            block.set_submodule("attn", NarrowAttention(block.attn))
        batches = problem.endless()
        times = BlockTimes(network, batch_size(next(iter(problem.batches))[0]), problem.num_tokens)
        for step in with_progress(range(1, self.num_steps + 1), "NViT"):
            widths = widths_of(network)
            scores = self._train(problem, network, widths, islice(batches, self.steps_between))
            turns = turns_to_go(less_latency(scores, times.savings(widths), self.latency_weight))
            target = problem.dense - (problem.dense - problem.budget) * step // self.num_steps
            network = remove(problem, network, widths, turns, target)
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
    """Importance less `weight` times latency, each divided by its mean over all units."""
    importance = torch.cat(list(scores.values()))
    latency = torch.cat([torch.full_like(score, savings[name]) for name, score in scores.items()])
    tiny = torch.finfo(importance.dtype).tiny
    regularised = importance / importance.mean().clamp(min=tiny) - weight * latency / latency.mean().clamp(min=tiny)
    return dict(zip(scores, regularised.split([len(score) for score in scores.values()]), strict=True))


def remove(
    problem: PruningProblem,
    model: VisionTransformer,
    widths: Mapping[str, Width],
    turns: Mapping[str, Tensor],
    target: int,
) -> VisionTransformer:
    """Remove as few units as possible, by their turns, until the model costs at most `target`; each width keeps one."""
    most = sum(width.size - 1 for width in widths.values())
    return problem.first_fit(
        lambda amount: without(model, widths, {name: turn >= amount for name, turn in turns.items()}), most, target
    )
