"""What a run will take, from the sizes of the layers alone: no image is read and no weight is needed.

Of cells that share a network and its data, one after another, with nothing in the cache yet.
"""

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from omegaconf import DictConfig, OmegaConf

from experiments.cell import instantiate
from facts.cost import count_cost, count_rows, meta_input
from facts.estimators import Estimator
from facts.layers import select_layers
from facts.moments import Moment
from facts.tasks import Task

BYTES = 4  # of a number in float32, in which moments and decompositions are kept
EFFICIENCY = 0.4  # of a large matrix product's speed that whole networks and decompositions reach
SVD_OPERATIONS = 22  # of a singular value decomposition, times d_in d_out min(d_in, d_out)


@dataclass(frozen=True)
class Rates:
    """Operations per second in float32 and in float64."""

    single: float
    double: float


@dataclass(frozen=True)
class Estimate:
    """Bytes on the device at once, bytes in the cache, and operations in float32 and in float64."""

    memory: int
    disk: int
    single: float
    double: float

    def seconds(self, rates: Rates) -> float:
        return (self.single / rates.single + self.double / rates.double) / EFFICIENCY


@dataclass(frozen=True)
class Network:
    """Its layers as `(d_in, d_out, rows per sample)`, operations of a forward pass, and parameters."""

    layers: tuple[tuple[int, int, int], ...]
    flops: int
    params: int

    def values(self, moments: Iterable[Moment], num_samples: int) -> int:
        """How many numbers these moments are."""
        return sum(moment.num_values(d_in, d_out, num_samples) for moment in moments for d_in, d_out, _ in self.layers)

    def pass_operations(self, moments: Iterable[Moment]) -> float:
        """For one sample: forward, backward without weight gradients, and the products that the moments are made of."""
        moments = list(moments)
        products = sum(
            2 * rows * math.prod(shape)
            for moment in moments
            for d_in, d_out, rows in self.layers
            for shape in moment.shapes(d_in, d_out)
            if len(shape) == 2
        )
        return (1 + any(moment.needs_grads for moment in moments)) * self.flops + products

    def decomposition_operations(self) -> float:
        return sum(SVD_OPERATIONS * d_in * d_out * min(d_in, d_out) for d_in, d_out, _ in self.layers)

    def decomposition_values(self) -> int:
        return sum(min(d_in, d_out) * (d_in + d_out + 1) for d_in, d_out, _ in self.layers)

    def search_operations(self, num_ratios: int) -> float:
        """For one sample: every layer at every ratio, on the part of the network behind it, half of it on average."""
        return len(self.layers) * num_ratios * self.flops / 2

    def batch_values(self, batch_size: int) -> int:
        """Inputs and output gradients of every layer."""
        return batch_size * sum(rows * (d_in + d_out) for d_in, d_out, rows in self.layers)


@cache
def network_of(recipe: str, task: Task) -> Network:
    """The network of a recipe in JSON, without its weights."""
    with torch.device("meta"):
        model = instantiate(OmegaConf.merge(OmegaConf.create(recipe), {"weights": "random"})).build()
    shape = task.input_shape(model)
    layers = select_layers(model)
    rows = count_rows(model, layers, meta_input(model, shape))
    cost = count_cost(model, shape, rule="full")
    sizes = tuple((layer.in_features, layer.out_features, rows[name]) for name, layer in layers.items())
    return Network(sizes, cost.flops, cost.params)


def estimate(configs: Iterable[DictConfig]) -> Estimate:
    """Of all cells of one network and its data together."""
    configs = list(configs)
    profile = configs[0].profile.name
    recipe = json.dumps(OmegaConf.to_container(configs[0].model[profile], resolve=True))
    task = instantiate(configs[0].task[profile])
    network = network_of(recipe, task)
    estimators = list(dict.fromkeys(filter(None, map(estimator_of, configs))))
    moments = list(dict.fromkeys(moment for estimator in estimators for moment in estimator.moments))
    single = task.num_calibration * network.pass_operations(moments) if moments else 0
    single += len(configs) * task.num_evaluation * network.flops
    for config in configs:
        single += task.num_sensitivity * network.search_operations(len(config.search.get("ratios", [])))
    double = len(estimators) * network.decomposition_operations()
    held = [moment for moment in moments if not moment.on_disk]
    disk = network.values(moments, task.num_calibration) + len(estimators) * network.decomposition_values()
    memory = network.params + network.values(held, task.num_calibration) + network.batch_values(task.batch_size)
    return Estimate(BYTES * memory, BYTES * disk, single, double)


def estimator_of(config: DictConfig) -> Estimator | None:
    return instantiate(config.estimator) if config.estimator["_target_"] else None


def measure_rates(device: str) -> Rates:
    """Large matrix products on a device, for a fraction of a second each."""
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
