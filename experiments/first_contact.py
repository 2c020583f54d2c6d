"""First contact with a device: what each network goes through, on a few samples, at each precision, against the CPU."""

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

from experiments.instantiation import instantiate
from facts.compression.budget import Budget
from facts.compression.compress import compress_prepared
from facts.compression.prepare import prepare
from facts.estimators import ESTIMATORS
from facts.finetuning import recover
from facts.modules.modes import autocast, evaluating
from facts.modules.networks import noise, run
from facts.moments.execution import Execution
from facts.search.methods.cors_fisher import CoRSFisher
from facts.search.methods.uniform import Uniform
from facts.tasks import Task
from facts.utils.batches import to_device
from facts.utils.progress import timed

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
    configs = {column[0].model.name: column[0] for column in columns}
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
        batch = samples_of(task, model, notes)
        expected = attempt(copy.deepcopy(model), task, batch, Trial(config.model.title, "float32"), teach=False)
    except Exception as error:
        yield Trial(config.model.title, "float32", notes=notes, failure=f"on the CPU: {_line(error)}")
        return
    for precision in PRECISIONS if device.type == "cuda" else ("float32", "bfloat16"):
        trial = Trial(config.model.title, precision, notes=list(notes))
        try:
            outputs = attempt(copy.deepcopy(model).to(device), task, batch, trial)
            trial.difference = relative_difference(outputs, expected)
        except Exception as error:
            trial.failure = _line(error)
        yield trial


def network_of(recipe: Any, notes: list[str]) -> nn.Module:
    """The network with its weights, or with random ones if these cannot be had."""
    try:
        return recipe.build()
    except (OSError, ValueError) as error:
        notes.append(f"random weights ({_line(error)})")
        return replace(recipe, weights="random").build()


def samples_of(task: Task, model: nn.Module, notes: list[str]) -> tuple[Any, Any]:
    """A few samples of the calibration data, or noise if these are not here."""
    try:
        inputs, targets = next(iter(task.calibration(model)))
        return tuple(tree_map_only(Tensor, lambda tensor: tensor[:NUM_SAMPLES], each) for each in (inputs, targets))
    except (OSError, ValueError) as error:
        shape = NUM_SAMPLES, *task.input_shape(model)[1:]
        notes.append(f"noise for data ({_line(error)})")
        return noise(model, shape, torch.device("cpu")), torch.zeros(NUM_SAMPLES, dtype=torch.int64)


def attempt(model: nn.Module, task: Task, batch: tuple[Any, Any], trial: Trial, teach: bool = True) -> Tensor:
    """Compress the first layers, search, run, and recover if `teach`; note the seconds.

    Returns the compressed network's outputs, on the CPU.
    """
    dtype, matmul, _ = PRECISIONS[trial.precision]
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
        with timed(trial.seconds, "factors"):
            result = compress_prepared(calibration, estimator, Uniform(), budget, "plain")
        searched = compress_prepared(calibration, estimator, CoRSFisher(labels="given"), budget, "plain")
        trial.seconds["search"] = searched.summary.seconds["search"]
        with timed(trial.seconds, "outputs"), torch.inference_mode(), evaluating(result.model), autocast(device, dtype):
            outputs = first_tensor(run(result.model, to_device(batch[0], device)))
        if teach:
            with timed(trial.seconds, "recovery"):
                recover(result, [batch[0]] * 2, epochs=1, batch_size=NUM_SAMPLES, num_warmups=0, views=False)
        return outputs


def first_tensor(outputs: Any) -> Tensor:
    return next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)).float().cpu()


def relative_difference(outputs: Tensor, expected: Tensor) -> float:
    return ((outputs - expected).norm() / expected.norm()).item()


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(name)
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]
