"""Tries each network on its device with a few samples, at each precision, and compares outputs with the CPU's."""

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from experiments.extras import OF_TASKS, missing_packages
from experiments.instantiation import instantiate
from facts.calibration.execution import Execution
from facts.calibration.prepare import prepare
from facts.compression.budget import Budget
from facts.compression.compress import compress_prepared
from facts.estimators import ESTIMATORS
from facts.finetuning import recover
from facts.models import Recipe
from facts.modules.modes import autocast, evaluating
from facts.modules.networks import noise, reads_tokens, run
from facts.moments.losses import next_tokens
from facts.search.methods.cors_fisher import CoRSFisher
from facts.search.methods.uniform import Uniform
from facts.tasks import Task
from facts.utils.batches import to_device
from facts.utils.stopwatch import timed

NUM_SAMPLES, NUM_LAYERS, RATIO = 8, 4, 0.7
STEPS = ("factors", "search", "outputs", "recovery")
# Most that outputs may differ from float32's on the CPU: ten times the rounding of sums over a few thousand products.
PRECISIONS = {
    "float32": (torch.float32, "highest", 1e-4),
    "TF32": (torch.float32, "high", 2e-2),
    "bfloat16": (torch.bfloat16, "highest", 1e-1),
}


@dataclass
class Trial:
    """One network at one precision: seconds by step, and the relative difference of its compressed outputs."""

    network: str
    precision: str
    seconds: dict[str, float] = field(default_factory=dict)
    difference: float | None = None
    notes: list[str] = field(default_factory=list)
    failure: str = ""

    @property
    def is_fine(self) -> bool:
        return not self.failure and (self.difference or 0) <= PRECISIONS[self.precision][2]


def first_contact(columns: list[list[DictConfig]], console: Console) -> bool:
    """Try each network on its device, print what worked and how fast; return whether all did."""
    able = [column[0] for column in columns if not missing_packages(OF_TASKS.get(column[0].task.name))]
    configs = {(config.model.name, config.task.name): config for config in able}
    table = Table("network", "precision", *STEPS, "difference", "", title="First contact, in seconds")
    trials = []
    for trial in itertools.chain.from_iterable(map(trials_of, configs.values())):
        trials.append(trial)
        seconds = (f"{trial.seconds[step]:.2f}" if step in trial.seconds else "" for step in STEPS)
        difference = "" if trial.difference is None else f"{trial.difference:.1e}"
        color = "green" if trial.is_fine else "red"
        remark = escape("; ".join(filter(None, [trial.failure, *trial.notes])))
        table.add_row(trial.network, trial.precision, *seconds, f"[{color}]{difference}[/]", remark)
        console.print(f"[{color}]{trial.network}, {trial.precision}[/]: {'works' if trial.is_fine else 'fails'}")
    console.print(table)
    return all(trial.is_fine for trial in trials)


def trials_of(config: DictConfig) -> Iterator[Trial]:
    """Every precision that the device has. What fails is told, and does not end the others."""
    profile, device = config.profile.name, torch.device(config.hardware.device)
    notes: list[str] = []
    try:
        model = network_of(instantiate(config.model[profile]), notes)
        task = instantiate(config.task[profile])
        batch = samples_of(task, model, notes, can_be_made_up=OF_TASKS.get(config.task.name) != "detection")
        expected = attempt(copy.deepcopy(model), task, batch, "float32", {})
    except Exception as error:
        yield Trial(config.model.title, "float32", notes=notes, failure=f"on the CPU: {_line(error)}")
        return
    for precision in PRECISIONS if device.type == "cuda" else ("float32", "bfloat16"):
        trial = Trial(config.model.title, precision, notes=list(notes))
        try:
            outputs = attempt(copy.deepcopy(model).to(device), task, batch, precision, trial.seconds)
            trial.difference = relative_difference(outputs, expected)
        except Exception as error:
            trial.failure = _line(error)
        yield trial


def network_of(recipe: Recipe, notes: list[str]) -> nn.Module:
    """The network with its weights, or with random ones if these are not on this machine."""
    try:
        if recipe.weights == "random" or recipe.checkpoint():
            return recipe.build()
        reason = "nothing is fetched here"
    except (OSError, ValueError) as error:
        reason = _line(error)
    notes.append(f"random weights ({reason})")
    return replace(recipe, weights="random").build()


def samples_of(task: Task, model: nn.Module, notes: list[str], can_be_made_up: bool) -> tuple[Any, Any]:
    """A few samples of the calibration data, or made-up images or tokens if there are none."""
    try:
        inputs, targets = next(iter(task.calibration(model)))
        return tuple(tree_map_only(Tensor, lambda tensor: tensor[:NUM_SAMPLES], each) for each in (inputs, targets))
    except (OSError, ValueError) as error:
        if not can_be_made_up:
            raise
        notes.append(f"noise for data ({_line(error)})")
        inputs = noise(model, (NUM_SAMPLES, *task.input_shape(model)[1:]), torch.device("cpu"))
        return inputs, next_tokens(inputs) if reads_tokens(model) else torch.zeros(NUM_SAMPLES, dtype=torch.int64)


def attempt(model: nn.Module, task: Task, batch: tuple[Any, Any], precision: str, seconds: dict[str, float]) -> Tensor:
    """Compress the first layers, search, run and recover; add the `seconds` of each step.

    Returns the compressed network's outputs, on the CPU. Raises `ValueError` if those of the recovered one are no
    numbers.
    """
    dtype, matmul, _ = PRECISIONS[precision]
    device = next(model.parameters()).device
    with matmul_precision(matmul):
        names = list(prepare(model, [batch], loss=task.loss).layers)[:NUM_LAYERS]
        calibration = prepare(
            model,
            [batch],
            layers=names,
            loss=task.loss,
            output_error=task.output_error,
            execution=Execution(dtype),
            input_shape=task.input_shape(model),
        )
        estimator, budget = ESTIMATORS["facts"](), Budget.of(RATIO, "flops")
        with timed(seconds, "factors"):
            result = compress_prepared(calibration, estimator, Uniform(), budget, "plain")
        searched = compress_prepared(calibration, estimator, CoRSFisher(labels="given"), budget, "plain")
        seconds["search"] = searched.summary.seconds["search"]

        def outputs_of(network: nn.Module) -> Tensor:
            with torch.inference_mode(), evaluating(network), autocast(device, dtype):
                return first_tensor(run(network, to_device(batch[0], device)))

        with timed(seconds, "outputs"):
            outputs = outputs_of(result.model)
        kind = "bfloat16" if dtype == torch.bfloat16 else "float32"
        with timed(seconds, "recovery"):
            lessons = [batch[0]] * 2
            recovered = recover(result, lessons, epochs=1, batch_size=NUM_SAMPLES, precision=kind, views=False)
        if not outputs_of(recovered.model).isfinite().all():
            raise ValueError("the recovered network's outputs are no numbers")
        return outputs


def first_tensor(outputs: Any) -> Tensor:
    return next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)).float().cpu()


def relative_difference(outputs: Tensor, expected: Tensor) -> float:
    return ((outputs - expected).norm() / expected.norm()).item()


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Precision of float32 products, and of convolutions, which PyTorch runs in TF32 by default."""
    before, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision(name)
        torch.backends.cudnn.allow_tf32 = name != "highest"
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]
