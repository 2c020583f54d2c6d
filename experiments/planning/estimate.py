"""Estimates of time, memory and disk of a run, without images or weights.

They are for cells that share a network and its data, run one after another, with an empty cache.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from omegaconf import DictConfig, OmegaConf

from experiments.instantiation import as_json, instantiate
from experiments.methods import method_of
from experiments.planning.network import Network, network_of
from experiments.planning.rates import EFFICIENCY, Rates
from experiments.planning.work import Subject, passes
from facts.estimators import Estimator
from facts.estimators.methods.gfwsvd import GFWSVD
from facts.moments import Moment
from facts.moments.memory import MAX_PARTS, MemoryPolicy
from facts.tasks import Task

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
    shared = list(dict.fromkeys(filter(None, (estimator_of(config) for config in configs if config.cache))))
    alone = [estimator for config in configs if not config.cache and (estimator := estimator_of(config))]
    together = [shared, *([estimator] for estimator in alone)]  # those that share a data pass
    num_passes = task.num_calibration * sum(network.data_passes(moments_of(group), memory) for group in together)
    for config in configs:
        parts = [
            method_of(config),
            *(instantiate(node[profile]) for node in (config.analysis, config.finetuning) if node),
        ]
        subject = Subject(network, task, classifier_share(config, network, task))
        num_passes += task.evaluation_passes + sum(passes(part, subject) for part in parts)
        num_passes += NUM_COMPARED if config.estimator["_target_"] else 0
    held = [moment for moment in moments_of([*shared, *alone]) if not moment.on_disk]
    disk = network.values(moments_of(shared), task.num_calibration) + len(shared) * network.decomposition_values()
    double = (decomposition_operations(each, network, task.num_calibration) for each in [*shared, *alone])
    return Estimate(
        recipe=recipe,
        parameters=BYTES * network.params,
        moments=BYTES * network.held_values(held, task.num_calibration, memory),
        batch=task.batch_size * network.sample_bytes,
        disk=BYTES * disk,
        batch_size=task.batch_size,
        passes=num_passes * task.sample_passes,
        flops=network.flops,
        double=sum(double),
    )


def moments_of(estimators: Iterable[Estimator]) -> list[Moment]:
    return list(dict.fromkeys(moment for estimator in estimators for moment in estimator.moments))


def classifier_share(config: DictConfig, network: Network, task: Task) -> float:
    """Operations of the classifier's pass over those of a sample of the network that is trained on it in stages."""
    if not config.stages:
        return 0.0
    profile = config.profile.name
    node = OmegaConf.to_container(config.model[profile].classifier, resolve=True)
    recipe = json.dumps({"_target_": "facts.models.TimmModel", **cast(dict, node)})
    own = network_of(recipe, instantiate(config.stages.task[profile]), MemoryPolicy(), ())
    return own.flops / (network.flops * task.sample_passes)


def decomposition_operations(estimator: Estimator, network: Network, num_samples: int) -> float:
    """Operations of the singular value decompositions, and of GFWSVD's iterations before them."""
    operations = network.decomposition_operations()
    if isinstance(estimator, GFWSVD):
        steps = GFWSVD_STEPS * EFFICIENCY  # large products, at their full speed
        operations += network.power_iteration_operations(num_samples // estimator.group_size, steps)
    return operations


def estimator_of(config: DictConfig) -> Estimator | None:
    return instantiate(config.estimator) if config.estimator["_target_"] else None
