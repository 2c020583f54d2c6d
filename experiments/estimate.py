"""Estimates of time and memory of a run, from the sizes of the layers alone, without images or weights.

They are for cells that share a network and its data, run one after another, with an empty cache.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from experiments.instantiation import as_json, instantiate
from facts.compression.selection import select_layers
from facts.cost.count import count_cost, meta_input
from facts.estimators import Estimator
from facts.modules.networks import run
from facts.moments import Moment
from facts.moments.capture import capturing
from facts.moments.checkpointing import BlockRun
from facts.moments.memory import MAX_PARTS, MemoryPolicy
from facts.tasks import Task

BYTES = 4  # of a value in float32, the type of stored moments and decompositions
EFFICIENCY = 0.4  # of a large matrix product's speed that whole networks and decompositions reach
SVD_OPERATIONS = 22  # of a singular value decomposition, times d_in d_out min(d_in, d_out)


@dataclass(frozen=True)
class Rates:
    """Operations per second in float32 and in float64."""

    single: float
    double: float


@dataclass(frozen=True)
class Estimate:
    """Bytes on the device and in the cache, and operations in float32 and in float64.

    The device holds the parameters, the moments, and the tensors that a batch keeps for the backward pass.
    """

    parameters: int
    moments: int
    batch: int
    disk: int
    single: float
    double: float
    batch_size: int

    @property
    def memory(self) -> int:
        """Bytes on the device, with all moments there and whole batches."""
        return self.parameters + self.moments + self.batch

    def num_parts(self, free: float, policy: MemoryPolicy) -> int | None:
        """Number of parts of each batch that fit beside the moments; None if no division helps."""
        left = free - self.parameters
        left -= min(self.moments, policy.room_of(left))
        most = min(MAX_PARTS, self.batch_size) if policy.halve_batches else 1
        choices = (2**i for i in range(most.bit_length()))
        return next((num_parts for num_parts in choices if self.batch / num_parts < left), None)

    def seconds(self, rates: Rates) -> float:
        return (self.single / rates.single + self.double / rates.double) / EFFICIENCY


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

    def pass_operations(self, moments: Iterable[Moment], memory: MemoryPolicy) -> float:
        """Operations of the data passes for one sample.

        Forward, backward without weight gradients, forward again if blocks are checkpointed, for each pass over the
        data, and the products that make up the moments.
        """
        moments = list(moments)
        products = sum(
            2 * rows * math.prod(shape)
            for moment in moments
            for d_in, d_out, rows in self.layers
            for shape in moment.shapes(d_in, d_out)
            if len(shape) == 2
        )
        once = 1 + (1 + memory.checkpoint_blocks) * any(moment.needs_grads for moment in moments)
        return len(memory.groups(self.layers)) * once * self.flops + products

    def decomposition_operations(self) -> float:
        return sum(SVD_OPERATIONS * d_in * d_out * min(d_in, d_out) for d_in, d_out, _ in self.layers)

    def decomposition_values(self) -> int:
        return sum(min(d_in, d_out) * (d_in + d_out + 1) for d_in, d_out, _ in self.layers)

    def search_operations(self, num_ratios: int) -> float:
        """Operations of a search for one sample.

        Every layer at every ratio, on the part of the network after it, half of it on average.
        """
        return len(self.layers) * num_ratios * self.flops / 2


@cache
def network_of(recipe: str, task: Task, memory: MemoryPolicy, excluded_names: tuple[str, ...]) -> Network:
    """Measure the network of a recipe in JSON, without its weights."""
    with torch.device("meta"):
        model = instantiate(OmegaConf.merge(OmegaConf.create(recipe), {"weights": "random"})).build()
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


def estimate(configs: Iterable[DictConfig]) -> Estimate:
    """Estimate all cells of one network and its data together."""
    configs = list(configs)
    profile = configs[0].profile.name
    recipe = as_json(configs[0].model[profile])
    task = instantiate(configs[0].task[profile])
    memory = MemoryPolicy(**configs[0].hardware.memory)
    network = network_of(recipe, task, memory, tuple(configs[0].excluded_names))
    estimators = list(dict.fromkeys(filter(None, map(estimator_of, configs))))
    moments = list(dict.fromkeys(moment for estimator in estimators for moment in estimator.moments))
    single = task.num_calibration * network.pass_operations(moments, memory) if moments else 0
    single += len(configs) * task.num_evaluation * network.flops
    for config in configs:
        single += task.num_sensitivity * network.search_operations(len(config.search.get("ratios", [])))
    double = len(estimators) * network.decomposition_operations()
    held = [moment for moment in moments if not moment.on_disk]
    disk = network.values(moments, task.num_calibration) + len(estimators) * network.decomposition_values()
    return Estimate(
        parameters=BYTES * network.params,
        moments=BYTES * network.held_values(held, task.num_calibration, memory),
        batch=task.batch_size * network.sample_bytes,
        disk=BYTES * disk,
        batch_size=task.batch_size,
        single=single,
        double=double,
    )


def estimator_of(config: DictConfig) -> Estimator | None:
    return instantiate(config.estimator) if config.estimator["_target_"] else None


def measure_rates(device: str) -> Rates:
    """Time large matrix products on a device, for a fraction of a second each."""
    return Rates(*(_rate(device, dtype) for dtype in (torch.float32, torch.float64)))


def _rate(device: str, dtype: torch.dtype, size: int = 1024, repeats: int = 5) -> float:
    matrix = torch.randn(size, size, dtype=dtype, device=device)
    wait: Callable[[], None] = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    matrix @ matrix
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        matrix @ matrix
    wait()
    return repeats * 2 * size**3 / (time.perf_counter() - start)
