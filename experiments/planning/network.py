"""Sizes of a network, counted on `meta`: without weights or images."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from experiments.instantiation import instantiate
from facts.calibration.selection import select_layers
from facts.cost.count import count_cost, meta_input
from facts.models import Recipe
from facts.modules.networks import run
from facts.moments import Moment
from facts.moments.batch import MIN_BLOCKED_SIZE, SYMMETRIC_BLOCKS
from facts.moments.capture import capturing
from facts.moments.checkpointing import BlockRun
from facts.moments.memory import MemoryPolicy
from facts.tasks import Task

SVD_OPERATIONS = 22  # of a singular value decomposition, times d_in d_out min(d_in, d_out)


@dataclass(frozen=True)
class Network:
    """Sizes of a network.

    `layers` as `(d_in, d_out, rows per sample)`, operations of a forward pass, parameters, and bytes that one sample
    keeps for the backward pass.
    """

    layers: tuple[tuple[int, int, int], ...]
    flops: int
    params: int
    sample_bytes: int

    def values(self, moments: Iterable[Moment], num_samples: int) -> int:
        """Number of values in these moments."""
        return sum(moment.num_values(d_in, d_out, num_samples) for moment in moments for d_in, d_out, _ in self.layers)

    def held_values(self, moments: Iterable[Moment], num_samples: int, memory: MemoryPolicy) -> int:
        """Number of values of these moments in memory at a time."""
        groups = [replace(self, layers=tuple(group)) for group in memory.groups(self.layers)]
        return max(group.values(moments, num_samples) for group in groups)

    def data_passes(self, moments: Iterable[Moment], memory: MemoryPolicy) -> float:
        """Forward passes that the data passes are worth, for one sample.

        Forward, backward without weight gradients, forward again if blocks are checkpointed, for each pass over the
        data; and the products that make up the moments, at their share of a forward pass's operations.
        """
        if not (moments := list(moments)):
            return 0.0
        products = sum(
            2 * rows * math.prod(shape) * symmetric_share(shape)
            for moment in moments
            for d_in, d_out, rows in self.layers
            for shape in moment.shapes(d_in, d_out)
            if len(shape) == 2
        )
        once = 1 + (1 + bool(memory.checkpoint_blocks)) * any(moment.needs_grads for moment in moments)
        return len(memory.groups(self.layers)) * once + products / self.flops

    @property
    def probe_passes(self) -> float:
        """Forward passes that the products of one sample's gradients with one probe are worth, and with its result."""
        return sum(4 * d_in * d_out for d_in, d_out, _ in self.layers) / self.flops

    def decomposition_operations(self) -> float:
        return sum(SVD_OPERATIONS * d_in * d_out * min(d_in, d_out) for d_in, d_out, _ in self.layers)

    def power_iteration_operations(self, num_gradients: int, num_steps: float) -> float:
        """Products D A Dᵀ and Dᵀ B D of every gradient in every step (GFWSVD)."""
        return sum(4 * d_in * d_out * (d_in + d_out) for d_in, d_out, _ in self.layers) * num_gradients * num_steps

    def decomposition_values(self) -> int:
        return sum(min(d_in, d_out) * (d_in + d_out + 1) for d_in, d_out, _ in self.layers)


def symmetric_share(shape: tuple[int, ...]) -> float:
    """The share of a product of this shape that is computed: large symmetric ones have their lower blocks alone."""
    large = shape[0] == shape[-1] >= MIN_BLOCKED_SIZE
    return (SYMMETRIC_BLOCKS + 1) / (2 * SYMMETRIC_BLOCKS) if large else 1


def without_weights(recipe: str) -> Recipe:
    """The recipe in JSON, of a network with random weights."""
    return instantiate(OmegaConf.merge(OmegaConf.create(recipe), {"weights": "random"}))


@cache
def network_of(recipe: str, task: Task, memory: MemoryPolicy, excluded_names: tuple[str, ...]) -> Network:
    """Measure the network of a recipe in JSON, without its weights."""
    with torch.device("meta"):
        model = without_weights(recipe).build()
    shape = task.input_shape(model)
    example = meta_input(model, shape)
    selection = select_layers(model, example=example, excluded_names=excluded_names)
    layers, rows = selection.layers, selection.rows
    cost = count_cost(model, shape, rule="full")
    assert cost.flops is not None  # the shape is known
    sizes = tuple((layer.in_features, layer.out_features, rows[name]) for name, layer in layers.items())
    blocks = memory.blocks(selection.model, layers.values())
    return Network(sizes, cost.flops, cost.params, kept_bytes(selection.model, layers, example, blocks))


def kept_bytes(
    model: nn.Module, layers: Mapping[str, nn.Linear], inputs: Tensor, blocks: Iterable[nn.Module] = ()
) -> int:
    """Peak bytes of these inputs in a data pass: inputs of layers, and tensors that autograd keeps.

    The loss is assumed to keep as much as the outputs take. Checkpointed `blocks` keep their arguments, and the largest
    of them its tensors when it runs again.
    """
    once, twice = (_peak_bytes(model, layers, torch.cat([inputs] * times), blocks) for times in (1, 2))
    return twice - once  # without weights, which autograd keeps too


def _peak_bytes(model: nn.Module, layers: Mapping[str, nn.Linear], inputs: Tensor, blocks: Iterable[nn.Module]) -> int:
    with capturing(model, layers, lambda name, x, g: None, blocks=blocks) as capture:
        capture.start_batch(len(inputs))
        checkpoints = capture.checkpoints

        def forward() -> list[Tensor]:
            outputs = [leaf for leaf in tree_leaves(run(model, inputs)) if isinstance(leaf, Tensor)]
            calls = itertools.chain(*capture.calls.values())
            given = [tensor for use in checkpoints.runs for tensor in use.tensors()]
            return [*outputs, *given, *(call.inputs for call in calls if call.inputs is not None)]

        def again(use: BlockRun) -> list[Tensor]:
            calls = list(itertools.chain(*use.calls.values()))
            checkpoints.execute(use)
            return [call.inputs for call in calls]

        return _kept_in(forward) + max((_kept_in(partial(again, use)) for use in checkpoints.runs), default=0)


def _kept_in(step: Callable[[], list[Tensor]]) -> int:
    """Bytes that autograd saves during a step, and bytes of the tensors that it returns."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        for tensor in step():
            keep(tensor)
    return sum(storage.nbytes() for storage in kept.values())
