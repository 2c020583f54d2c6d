"""NViT: latency-aware iterative pruning (Yang et al., 2023)."""

import copy
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import scipy
import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from facts.pruning.base import TOKENS, Pruner, PruningProblem, check_vit, removal_order, slice_parameter, update_sizes
from facts.utils.batches import batch_size
from facts.utils.options import Count, NotNegative, options
from facts.utils.progress import with_progress

MIN_SECONDS = 0.02  # in which the time of a block is measured
EMBEDDING = "embedding"
BLOCK_WIDTHS = ("heads", "key_dims", "value_dims", "hidden")
READING = ("qkv", "fc1", "head", "head_dist")  # layers that read the embedding


@dataclass(frozen=True)
class Width:
    """Number of units, and the unit of every entry of a parameter along an axis, by its name and axis; -1 for none."""

    size: int
    units: dict[tuple[str, int], Tensor]


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
    with torch.cuda.device_of(inputs):
        return timer.blocked_autorange(min_run_time=MIN_SECONDS).median


class NarrowAttention(nn.Module):
    """timm's attention with the same weights and scale; queries and keys may differ in width from values."""

    def __init__(self, attention: Attention):
        super().__init__()
        self.num_heads, self.scale = attention.num_heads, attention.scale
        self.qkv, self.attn_drop = attention.qkv, attention.attn_drop
        self.proj, self.proj_drop = attention.proj, attention.proj_drop
        self.key_dim = self.value_dim = attention.head_dim

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        keys, values = self.num_heads * self.key_dim, self.num_heads * self.value_dim
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).split([keys, keys, values], dim=-1)
        )
        drop = self.attn_drop.p if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, attn_mask, drop, is_causal, scale=self.scale)
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))


def widths_of(model: VisionTransformer) -> dict[str, Width]:
    """Find the embedding and four widths per block of a network with `NarrowAttention`; heads stay equally wide."""
    widths = {EMBEDDING: _embedding(model)}
    for number, block in enumerate(model.blocks):
        attn = block.attn
        sizes = (attn.num_heads, attn.key_dim, attn.value_dim, block.mlp.fc1.out_features)
        heads, keys, values, hidden = (torch.arange(size) for size in sizes)
        head_of_key, head_of_value = (heads.repeat_interleave(len(dims)) for dims in (keys, values))
        no_key, no_value = -torch.ones_like(head_of_key.repeat(2)), -torch.ones_like(head_of_value)
        value_of_head = values.repeat(len(heads))
        units = (  # one for each output of the first layer, and for each input of the second
            (torch.cat([head_of_key, head_of_key, head_of_value]), head_of_value),
            (torch.cat([keys.repeat(2 * len(heads)), no_value]), None),
            (torch.cat([no_key, value_of_head]), value_of_head),
            (hidden, hidden),
        )
        layers = [("attn.qkv", "attn.proj")] * 3 + [("mlp.fc1", "mlp.fc2")]
        for name, size, (first, second), (outputs, inputs) in zip(BLOCK_WIDTHS, sizes, layers, units, strict=True):
            parameters = block.get_submodule(first).named_parameters()
            places = {(f"blocks.{number}.{first}.{parameter}", 0): outputs for parameter, _ in parameters}
            if inputs is not None:
                places[f"blocks.{number}.{second}.weight", 1] = inputs
            widths[f"blocks.{number}.{name}"] = Width(size, places)
    return widths


def _embedding(model: VisionTransformer) -> Width:
    names = [name for name, _ in model.named_parameters()]
    places = [(token, 2) for token in TOKENS if token in names]
    for name in names:
        layer, _, parameter = name.rpartition(".")
        reads = layer.endswith(READING)
        if layer and not (reads and parameter == "bias"):
            places.append((name, int(reads)))  # the others write or normalise it
    return Width(model.embed_dim, dict.fromkeys(places, torch.arange(model.embed_dim)))


def importance(model: VisionTransformer, widths: Mapping[str, Width]) -> dict[str, Tensor]:
    """(Σ gradient · weight)² over the entries of each unit, for the current gradients: NViT's saliency."""
    scores = {}
    device = next(model.parameters()).device
    for name, width in widths.items():
        total = torch.zeros(width.size + 1, device=device)  # the last entry is for unit -1
        for (parameter_name, axis), units in width.units.items():
            parameter: Any = model.get_parameter(parameter_name)  # with a gradient
            products = (parameter.detach() * parameter.grad).movedim(axis, 0).reshape(len(units), -1)
            total.index_add_(0, units.to(device) % len(total), products.sum(dim=1))
        scores[name] = total[:-1].square()
    return scores


def without(model: VisionTransformer, widths: Mapping[str, Width], kept: Mapping[str, Tensor]) -> VisionTransformer:
    """Copy the model; each width keeps the units in its mask in `kept`."""
    model = copy.deepcopy(model)
    masks: dict[tuple[str, int], Tensor] = {}
    for name, width in widths.items():
        keeps = torch.cat([kept[name], torch.ones(1, dtype=torch.bool)])  # unit -1 stays
        for place, units in width.units.items():
            masks[place] = keeps[units] & masks.get(place, True)
    for (name, axis), mask in masks.items():
        module, _, parameter = name.rpartition(".")
        slice_parameter(model.get_submodule(module), parameter, axis, mask.nonzero().squeeze(1))
    for number, block in enumerate(model.blocks):
        heads, key_dims, value_dims, _ = (int(kept[f"blocks.{number}.{name}"].sum()) for name in BLOCK_WIDTHS)
        block.attn.num_heads, block.attn.key_dim, block.attn.value_dim = heads, key_dims, value_dims
    update_sizes(model)
    return model
