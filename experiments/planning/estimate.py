"""Estimates of time, memory and disk of a run, without images or weights.

They are for cells that share a network and its data, run one after another, with an empty cache.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from omegaconf import DictConfig

from experiments.instantiation import as_json, instantiate
from experiments.methods import method_of
from experiments.planning.network import Network, network_of
from experiments.planning.rates import EFFICIENCY, Rates
from experiments.planning.work import Subject, passes
from facts.estimators import Estimator
from facts.estimators.methods.gfwsvd import GFWSVD
from facts.moments.memory import MAX_PARTS, MemoryPolicy

BYTES = 4  # of a value in float32, the type of stored moments and decompositions
GFWSVD_STEPS = 17  # of its power iteration, until it changes by 1e-8: the mean over the layers of four small networks
NUM_COMPARED = 64 * 2  # samples that a compression is compared on, dense and compressed


@dataclass(frozen=True)
class Estimate:
    """Bytes on the device and in the cache, and work.

    The device holds the parameters, the moments, and the tensors that a batch keeps for the backward pass. The work is
    `passes`, forward passes of one sample by the network of the `recipe` in JSON, of `flops` operations each, and
    `double`, operations in float64.
    """

    recipe: str
    parameters: int
    moments: int
    batch: int
    disk: int
    passes: float
    flops: float
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
        a_pass = rates.passes.get(self.recipe, self.flops / rates.single)
        return self.passes * a_pass + self.double / rates.double


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
    num_passes = task.num_calibration * network.data_passes(moments, memory) if moments else 0
    for config in configs:
        parts = [
            method_of(config),
            *(instantiate(node[profile]) for node in (config.analysis, config.finetuning) if node),
        ]
        num_passes += task.evaluation_passes + sum(passes(part, Subject(network, task)) for part in parts)
        num_passes += NUM_COMPARED if config.estimator["_target_"] else 0
    held = [moment for moment in moments if not moment.on_disk]
    disk = network.values(moments, task.num_calibration) + len(estimators) * network.decomposition_values()
    return Estimate(
        recipe=recipe,
        parameters=BYTES * network.params,
        moments=BYTES * network.held_values(held, task.num_calibration, memory),
        batch=task.batch_size * network.sample_bytes,
        disk=BYTES * disk,
        batch_size=task.batch_size,
        passes=num_passes * task.sample_passes,
        flops=network.flops,
        double=sum(decomposition_operations(estimator, network, task.num_calibration) for estimator in estimators),
    )


def decomposition_operations(estimator: Estimator, network: Network, num_samples: int) -> float:
    """Operations of the singular value decompositions, and of GFWSVD's iterations before them."""
    operations = network.decomposition_operations()
    if isinstance(estimator, GFWSVD):
        steps = GFWSVD_STEPS * EFFICIENCY  # large products, at their full speed
        operations += network.power_iteration_operations(num_samples // estimator.group_size, steps)
    return operations


def estimator_of(config: DictConfig) -> Estimator | None:
    return instantiate(config.estimator) if config.estimator["_target_"] else None
