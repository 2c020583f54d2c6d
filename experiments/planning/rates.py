"""Speed of this machine: large matrix products, and a network's own passes where these take a moment only."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from statistics import median

import torch
from omegaconf import DictConfig, OmegaConf

from experiments.instantiation import as_json, instantiate
from experiments.planning.network import without_weights
from facts.modules.modes import evaluating
from facts.modules.networks import noise, run

EFFICIENCY = 0.4  # of a large matrix product's speed that whole networks and decompositions reach
SOON = 0.5  # seconds: a batch that takes no longer by its operations is timed
NUM_TIMED = 5


@dataclass(frozen=True)
class Rates:
    """Operations per second in float32 and in float64, and seconds of a network's forward pass of one sample.

    `passes` are those that were timed, by the recipe in JSON; the others are told by their operations.
    """

    single: float
    double: float
    passes: dict[str, float]


def measure_rates(configs: Iterable[tuple[DictConfig, float]]) -> Rates:
    """Time what these cells run on their device, each given with the operations of its network's pass of one sample."""
    configs = list(configs)
    hardware = configs[0][0].hardware
    with num_threads(hardware.num_threads):
        single, double = (EFFICIENCY * _rate(hardware.device, dtype) for dtype in (torch.float32, torch.float64))
        timed = {}
        for config, operations in configs:
            profile = config.profile.name
            task = instantiate(config.task[profile])
            if task.batch_size * operations / single <= SOON:
                recipe = as_json(config.model[profile])
                timed[recipe] = _pass_seconds(recipe, as_json(config.task[profile]), hardware.device)
    return Rates(single, double, timed)


@contextmanager
def num_threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    yield
    torch.set_num_threads(before)


def _rate(device: str, dtype: torch.dtype, size: int = 1024) -> float:
    matrix = torch.randn(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _seconds(lambda: matrix @ matrix, device)


@cache
def _pass_seconds(recipe: str, task_recipe: str, device: str) -> float:
    """Seconds of a forward pass for one sample, in a batch of the task's size, with random weights."""
    model = without_weights(recipe).build().to(device)
    task = instantiate(OmegaConf.create(task_recipe))
    batch = noise(model, (task.batch_size, *task.input_shape(model)[1:]), torch.device(device))
    with torch.inference_mode(), evaluating(model):
        return _seconds(lambda: run(model, batch), device) / task.batch_size


def _seconds(call: Callable[[], object], device: str) -> float:
    """The median time of a call, after one that warms up."""
    wait: Callable[[], None] = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    seconds = []
    for _ in range(1 + NUM_TIMED):
        wait()
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])
