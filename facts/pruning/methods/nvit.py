"""NViT: latency-aware iterative pruning (Yang et al., 2023)."""

import copy
import itertools
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any

import scipy
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from facts.pruning.base import Pruner, PruningProblem, removal_order
from facts.pruning.vit import check_vit
from facts.pruning.widths import BLOCK_WIDTHS, EMBEDDING, NarrowAttention, Width, importance, widths_of, without
from facts.utils.batches import batch_size
from facts.utils.options import Count, NotNegative, options
from facts.utils.progress import with_progress

MIN_SECONDS = 0.02  # in which the time of a block is measured


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


class BlockTimes:
    """Seconds of the first block by its widths: measured at full and half widths, linear between and beyond."""

    def __init__(self, model: VisionTransformer, batch: int, tokens: int):
        single = copy.deepcopy(model)
        single.blocks = single.blocks[:1]
        widths = widths_of(single)
        axes = [(width.size // 2, width.size) for width in widths.values()]
        seconds = [_seconds(single, widths, sizes, batch, tokens) for sizes in itertools.product(*axes)]
        table = torch.tensor(seconds).view([2] * len(axes)).numpy()
        self.table = scipy.interpolate.RegularGridInterpolator(axes, table, bounds_error=False, fill_value=None)

    def savings(self, widths: Mapping[str, Width]) -> dict[str, float]:
        """Seconds that the whole network saves if one unit is removed, for each width."""
        saved = dict.fromkeys(widths, 0.0)
        for number in range((len(widths) - 1) // len(BLOCK_WIDTHS)):
            names = [EMBEDDING, *(f"blocks.{number}.{name}" for name in BLOCK_WIDTHS)]
            sizes = torch.tensor([widths[name].size for name in names])
            points = torch.cat([sizes[None], sizes - torch.eye(len(sizes), dtype=torch.long)])
            whole, *less = self.table(points.numpy()).tolist()
            for name, seconds in zip(names, less, strict=True):
                saved[name] += max(0.0, whole - seconds)  # measured times may be longer for less work
        return saved


@torch.no_grad()
def _seconds(
    model: VisionTransformer, widths: Mapping[str, Width], sizes: tuple[int, ...], batch: int, tokens: int
) -> float:
    kept = {
        name: torch.arange(width.size) < max(1, size)  # half of one unit is one unit
        for (name, width), size in zip(widths.items(), sizes, strict=True)
    }
    block: nn.Module = without(model, widths, kept).blocks[0]
    inputs = next(block.parameters()).new_ones(batch, tokens, max(1, sizes[0]))
    timer = Timer("block(inputs)", globals={"block": block, "inputs": inputs}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=MIN_SECONDS).median
