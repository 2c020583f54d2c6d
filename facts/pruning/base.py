"""Pruning methods: from a network and a budget to a narrower copy."""

import copy
import itertools
import math
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from timm.layers import Attention, Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from facts.calibration.prepared_model import PreparedModel
from facts.cost.count import count_cost, count_params
from facts.modules.networks import autocast
from facts.utils.batches import batch_size, to_device
from facts.utils.options import options

TOKENS = ("cls_token", "dist_token", "reg_token", "pos_embed")
LAYERS = r"patch_embed\.proj|blocks\.\d+\.(norm[12]|attn\.(qkv|proj)|mlp\.fc[12])|norm|fc_norm|head|head_dist"
KNOWN_PARAMETERS = re.compile(rf"{'|'.join(TOKENS)}|({LAYERS})\.(weight|bias)")
PrunedCost = Literal["params", "flops"]
Pruned = TypeVar("Pruned", bound=nn.Module)
Name = TypeVar("Name")


@dataclass(frozen=True)
class PruningProblem:
    """A network and the `ratio` of its `cost` (the whole network's, by the paper's rule) that may remain.

    FLOPs are counted for `input_shape`. Raises `ValueError` for an invalid ratio, and without data.
    """

    prepared: PreparedModel
    ratio: float
    input_shape: tuple[int, ...]
    cost: PrunedCost = "params"

    def __post_init__(self):
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio is the fraction that remains and must lie in (0, 1], got {self.ratio}")
        if next(iter(self.batches), None) is None:  # `endless` would wait for ever
            raise ValueError("pruning needs calibration data: an iterable of (inputs, targets) batches")

    @property
    def batches(self) -> Iterable[tuple[Any, Any]]:
        return self.prepared.data or ()

    def spent(self, model: nn.Module) -> int:
        spent = count_params(model) if self.cost == "params" else count_cost(model, self.input_shape).flops
        assert spent is not None  # the shape is known
        return spent

    @property
    def num_tokens(self) -> int:
        """Number of tokens per image in the blocks of a vision transformer."""
        return self.prepared.part_of["blocks.0.attn.qkv"].rows

    @cached_property
    def dense(self) -> int:
        return self.spent(self.prepared.model)

    @cached_property
    def budget(self) -> int:
        """Cost that may remain, with the ratio as a decimal: 0.7 of 10 is 7."""
        return math.floor(Fraction(str(self.ratio)) * self.dense)

    def first_fit(self, pruned: Callable[[int], Pruned], most: int, budget: int | None = None) -> Pruned:
        """Return the first `pruned(amount)` within the budget, for amounts up to `most`; larger amounts cost less."""
        budget = self.budget if budget is None else budget
        amount = bisect_left(range(most + 1), True, key=lambda amount: self.spent(pruned(amount)) <= budget)
        if amount > most:
            raise ValueError(
                f"{budget} {self.cost} cannot be reached: the smallest pruned network has {self.spent(pruned(most))}, "
                f"the original {self.dense}; use a larger ratio"
            )
        return pruned(amount)

    def endless(self) -> Iterator[tuple[Any, Any]]:
        return itertools.chain.from_iterable(itertools.repeat(self.batches))

    def mean_loss(self, model: nn.Module, batch: tuple[Any, Any]) -> Tensor:
        device = next(model.parameters()).device
        inputs, targets = to_device(batch, device)
        with autocast(device, self.prepared.execution.precision):
            return self.prepared.loss(model(inputs), targets) / batch_size(inputs)


def removal_order(scores: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
    """Rank all units of all groups in one order, from 0: smallest score first, but the largest of each group last."""
    staying = [score.index_fill(0, score.argmax(), float("inf")) for score in scores.values()]
    order = torch.cat(staying).argsort(stable=True)
    return dict(zip(scores, order.argsort().split([len(score) for score in staying]), strict=True))


@options
class Pruner(ABC):
    """A structured pruning method."""

    def prune(self, problem: PruningProblem) -> nn.Module:
        """Return a copy within the budget, in evaluation mode.

        Raises `ValueError` for a network that the method does not support and for a budget that it cannot reach.
        """
        model = copy.deepcopy(problem.prepared.model).eval()
        return model if problem.dense <= problem.budget else self.narrowed(problem, model)

    @abstractmethod
    def narrowed(self, problem: PruningProblem, model: nn.Module) -> nn.Module:
        """Prune `model`, a copy of the problem's network that may be changed."""


def check_vit(model: nn.Module) -> VisionTransformer:
    """Return the network. Raises `ValueError` if it has parameters that would not be pruned with the others."""
    supported = (
        "pruning supports timm's plain and distilled vision transformers (vit_*, deit_*) without layer scale, norms "
        "in their attention, or attention pooling; "
    )
    if not isinstance(model, VisionTransformer):
        raise ValueError(f"{supported}this is a {type(model).__name__}")
    if unknown := [name for name, _ in model.named_parameters() if not KNOWN_PARAMETERS.fullmatch(name)]:
        raise ValueError(f"{supported}this one has {', '.join(unknown[:3])}")
    for name, block in model.blocks.named_children():
        if (type(block), type(block.attn), type(block.mlp)) != (Block, Attention, Mlp):
            raise ValueError(f"{supported}block {name} of this one was changed: prune the original network")
    return model


def slice_parameter(module: nn.Module, name: str, axis: int, kept: Tensor) -> None:
    """Keep the entries `kept` along one axis of a parameter, if the module has it."""
    if (parameter := getattr(module, name)) is not None:
        sliced = parameter.detach().index_select(axis, kept.to(parameter.device))
        setattr(module, name, nn.Parameter(sliced, requires_grad=parameter.requires_grad))


def update_sizes(model: nn.Module) -> None:
    """Set the size attributes of the layers and the network from their parameters' shapes."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.Conv2d):
            module.out_channels = len(module.weight)
        elif isinstance(module, nn.LayerNorm):
            module.normalized_shape = tuple(module.weight.shape)
        elif isinstance(module, VisionTransformer):
            module.embed_dim = module.num_features = module.head_hidden_size = len(module.patch_embed.proj.weight)
