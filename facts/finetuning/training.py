"""Training: steps, checkpoints, progress."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from facts.finetuning.factors import plain_factors
from facts.finetuning.recipe import Finetuning
from facts.finetuning.state import State
from facts.modules.modes import autocast, evaluating
from facts.tasks import Task
from facts.utils import distributed
from facts.utils.batches import batch_size, to_device
from facts.utils.cache import Cache, content_key
from facts.utils.random import seeded

log = logging.getLogger(__name__)

Numbered = tuple[int, tuple[Any, Any]]
"""A batch and its number in the epoch."""


@dataclass(frozen=True)
class Outcome:
    """The mean loss of each epoch, and the time of all steps, those before an interruption too."""

    losses: list[float]
    seconds: float


def finetune(
    student: nn.Module, teacher: nn.Module, task: Task, recipe: Finetuning, folder: Path | str | None = None
) -> Outcome:
    """Train all parameters of `student` in place, on the task's training batches; `teacher` stays as it is.

    Pivoted layers are trained as plain factors, and become pivoted again.

    Checkpoints are kept in `folder`, under a hash of the recipe, both networks and the data. A second call with the
    same untrained student continues at the last checkpoint, or returns at once if training was finished; any other call
    starts from the beginning and leaves these checkpoints alone. On a CPU, an interruption does not change a bit of the
    weights. Processes started by torchrun share each step's batches. The statistics of BatchNorm stay fixed unless the
    recipe trains them, since a part of a batch has other statistics.

    Raises `ValueError` if the loss is not finite, `MemoryError` if the device's memory is too small.
    """

    def train() -> Outcome:
        checkpoint = f"finetuning-{_fingerprint(student, teacher, task, recipe)}" if folder else ""
        with plain_factors(student, recipe.autocast_type):
            return _Training(student, teacher, task, recipe, folder, checkpoint).run()

    return distributed.on_all_ranks(train)


def _fingerprint(student: nn.Module, teacher: nn.Module, task: Task, recipe: Finetuning) -> str:
    return content_key(recipe.identity(), repr(student), student, teacher, task.content_key(teacher))


class _Training:
    def __init__(
        self, student: nn.Module, teacher: nn.Module, task: Task, recipe: Finetuning, folder: Any, checkpoint: str
    ):
        self.student, self.teacher, self.task, self.recipe = student, teacher, task, recipe
        self.device = next(student.parameters()).device
        self.cache = Cache(folder) if folder else None
        self.checkpoint = checkpoint
        self.num_batches = len(task.training(teacher, 0, recipe.seed))
        if not self.num_batches:
            raise ValueError("the task has not one whole batch to train on: lower its batch_size")
        self.steps_per_epoch = -(-self.num_batches // recipe.accumulate)
        student.requires_grad_(True)
        self.state = State(student, recipe)
        self.total_steps = recipe.num_epochs * self.steps_per_epoch
        self.schedule = CosineLRScheduler(
            self.state.optimizer, self.total_steps, lr_min=recipe.min_learning_rate, t_in_epochs=False
        )

    def run(self) -> Outcome:
        self._resume()
        with evaluating(self.teacher), _training(self.student, self.recipe), _progress(self.total_steps) as progress:
            progress(self.state.steps)
            while self.state.steps < self.total_steps:
                self._epoch(self.state.steps // self.steps_per_epoch, progress)
        self.student.zero_grad()
        loss, samples = self.state.totals.T
        return Outcome((loss / samples).tolist(), self.state.seconds)

    def _epoch(self, epoch: int, progress: Any) -> None:
        """Train the rest of an epoch, of which some steps may be done."""
        first = self.state.steps % self.steps_per_epoch
        own = slice(first * self.recipe.accumulate + distributed.rank(), None, distributed.size())
        numbers = range(self.num_batches)[own]
        batches = iter(self.task.training(self.teacher, epoch, self.recipe.seed)[own])
        for step in range(first, self.steps_per_epoch):
            start = time.perf_counter()
            in_step = range(step * self.recipe.accumulate, (step + 1) * self.recipe.accumulate)
            chosen = [number for number in in_step if number in numbers]
            loss = self._step(epoch, list(zip(chosen, islice(batches, len(chosen)), strict=True)))
            self.state.seconds += time.perf_counter() - start
            progress(self.state.steps, loss)
            if step + 1 == self.steps_per_epoch or self.state.steps % self.recipe.save_every == 0:
                self._save(epoch)

    def _step(self, epoch: int, batches: list[Numbered]) -> float:
        """Update the weights once, from the batches of all processes. Returns the mean loss."""
        state, recipe = self.state, self.recipe
        num_samples = sum(distributed.all_gather(sum(batch_size(inputs) for _, (inputs, _) in batches)))
        parameters = list(self.student.parameters())
        for parameter in parameters:  # zeros rather than None: a process may have no batch left
            parameter.grad = torch.zeros_like(parameter)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, batch in batches:
            total += self._add_gradients((recipe.seed, epoch, number), batch, num_samples)
        distributed.all_reduce([total, *(parameter.grad for parameter in parameters if parameter.grad is not None)])
        loss = total.item()
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss is {loss} in epoch {epoch}, step {state.steps}: lower learning_rate, or take precision "
                "float32 or bfloat16"
            )
        state.scaler.unscale_(state.optimizer)
        if recipe.clip_grad:
            nn.utils.clip_grad_norm_(parameters, recipe.clip_grad)
        self.schedule.step_update(state.steps)
        state.scaler.step(state.optimizer)
        state.scaler.update()
        if recipe.train_batch_norm:
            self._share_statistics()
        state.steps += 1
        state.totals[epoch] += torch.tensor([loss * num_samples, num_samples], dtype=torch.float64)
        return loss

    def _share_statistics(self) -> None:
        """Average the statistics of BatchNorm over the processes, each of which saw its own batches."""
        norms = [module for module in self.student.modules() if isinstance(module, _BatchNorm)]
        buffers = (buffer for norm in norms for buffer in (norm.running_mean, norm.running_var))
        statistics = [buffer for buffer in buffers if buffer is not None]
        distributed.all_reduce(statistics)
        for buffer in statistics:
            buffer /= distributed.size()

    def _add_gradients(self, seed: tuple[int, ...], batch: tuple[Any, Any], num_samples: int) -> Tensor:
        """Add the gradients of one batch's share in the step's mean loss; return that share."""
        inputs, targets = to_device(batch, self.device)
        try:
            with seeded(*seed, device=self.device), autocast(self.device, self.recipe.autocast_type):
                loss = self.recipe.loss(self.task, self.student, self.teacher, inputs, targets) / num_samples
            self.state.scaler.scale(loss).backward()
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"the device ran out of memory with a batch of {batch_size(inputs)} ({error}); divide "
                "the task's batch_size, and multiply Finetuning(accumulate=) by as much: a step sees the same samples"
            ) from error
        return loss.detach()

    def _resume(self) -> None:
        tensors = self.cache.load(self.checkpoint) if self.cache else None
        if None in distributed.all_gather(tensors and True) or tensors is None:
            return
        self.state.restore(tensors)
        log.info("finetuning continues after step %d of %d", self.state.steps, self.total_steps)

    def _save(self, epoch: int) -> None:
        """Write a checkpoint, if they are kept, and log the progress, since a log file shows no bar."""
        if cache := self.cache:
            distributed.on_main_rank(lambda: cache.save(self.checkpoint, self.state.tensors()))
        steps, (loss, samples) = self.state.steps, self.state.totals[epoch].tolist()
        left = timedelta(seconds=round(self.state.seconds / steps * (self.total_steps - steps)))
        log.info(
            "finetuning: step %d of %d, mean loss of epoch %d %.4g, %s left",
            steps, self.total_steps, epoch + 1, loss / samples, left,
        )  # fmt: skip


@contextmanager
def _training(model: nn.Module, recipe: Finetuning) -> Iterator[None]:
    """Training mode within the block, for BatchNorm only if the recipe trains it; evaluation mode afterwards."""
    model.train()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.train(recipe.train_batch_norm)
    try:
        yield
    finally:
        model.eval()


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A function that shows the steps done, the loss and an estimate of the time left, on the main rank."""
    columns = (
        TextColumn("finetuning"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, transient=True, console=console, disable=not distributed.is_main_rank()) as progress:
        bar = progress.add_task("", total=total, loss="")

        def show(completed: int, loss: float | None = None) -> None:
            progress.update(bar, completed=completed, loss="" if loss is None else f"loss {loss:.4g}")

        yield show
