"""Training: steps, checkpoints, progress; and PELA's protocol, whose stages train a backbone, then the network."""

import logging
import math
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_structure

from facts.finetuning.recipe import Finetuning, TrainingData
from facts.finetuning.state import State, plain_factors
from facts.models.openmmlab import untrained
from facts.modules.networks import autocast, evaluating, run, without_autocast
from facts.parts import Plan
from facts.result import CompressionResult
from facts.tasks.base import Task
from facts.utils import distributed
from facts.utils.batches import batch_size, to_device
from facts.utils.cache import Cache, content_key
from facts.utils.numerics import seeded
from facts.utils.progress import Show, progress_of, report, timed

log = logging.getLogger(__name__)

Numbered = tuple[int, tuple[Any, Any]]
"""A batch and its number in the epoch."""

Validate = Callable[[nn.Module], float]
"""Maps a network, in any mode, to its error on samples that it is not trained on, the same in all processes."""

NUM_TRIALS = 4  # steps to estimate how many fit into the given minutes; the first of them is not timed
MARGIN = 0.02  # fraction of the given minutes for work that is not timed


@dataclass(frozen=True)
class Outcome:
    """The mean loss of each epoch, and the time, including that of an interrupted run up to its last checkpoint.

    `errors` are those measured by `validate` before the training and after each epoch; `seconds_before` is the
    interrupted run's time.
    """

    losses: list[float]
    seconds: float
    seconds_before: float = 0.0
    errors: list[float] = field(default_factory=list)


def finetune(
    student: nn.Module,
    teacher: nn.Module,
    data: TrainingData,
    recipe: Finetuning,
    folder: Path | str | None = None,
    validate: Validate | None = None,
    start: float | None = None,
) -> Outcome:
    """Train all parameters of `student` in place, on batches of a task or of inputs only; `teacher` is unchanged.

    Pivoted layers are trained as plain factors, and become pivoted again. With `validate`, the student ends with the
    weights of the smallest error, possibly its initial ones. There is no early stopping: high rates hurt before they
    help. A recipe's minutes count from `start`, a value of `time.perf_counter` (default: now).

    Checkpoints are kept in `folder`, under a hash of the recipe, both networks and the data: a second call with the
    same untrained student continues from the last one. On a CPU, an interruption does not change a bit of the weights,
    unless the recipe limits the time. Processes started by torchrun share each step's batches. BatchNorm's statistics
    stay fixed unless the recipe trains them, since a part of a batch has other statistics.

    Raises `ValueError` if the loss is not finite, `MemoryError` if the device's memory runs out.
    """
    start = time.perf_counter() if start is None else start

    def train() -> Outcome:
        cache, checkpoint = Cache(Path(folder)) if folder else None, ""
        if cache:
            of_data = data.content_key(teacher)
            checkpoint = f"finetuning-{content_key(recipe.identity(), repr(student), student, teacher, of_data)}"
        with plain_factors(student), without_autocast(next(student.parameters()).device):
            return _Training(student, teacher, data, recipe, cache, checkpoint, validate, start).run()

    return distributed.on_all_ranks(train)


@dataclass
class _Training:
    student: nn.Module
    teacher: nn.Module
    data: TrainingData
    recipe: Finetuning
    cache: Cache | None
    checkpoint: str
    validate: Validate | None
    start: float
    seconds_before: float = 0.0
    timed_from: tuple[int, float] | None = None  # steps and seconds after this process's first step
    is_settled: bool = False

    def __post_init__(self) -> None:
        self.device = next(self.student.parameters()).device
        self.num_batches = len(self.data.training(self.teacher, 0, self.recipe.seed))
        if not self.num_batches:
            raise ValueError("the task has no complete batch to train on: lower its batch_size")
        self.steps_per_epoch = -(-self.num_batches // self.recipe.accumulate)
        self.most_steps = self.recipe.num_epochs * self.steps_per_epoch
        self.student.requires_grad_(True)
        self.norms = [module for module in self.student.modules() if isinstance(module, _BatchNorm)]
        distributed.copy_from_main_rank(self.student.parameters())  # factors may differ by rounding
        self.state = State(self.student, self.recipe, self.most_steps)
        self._schedule(initialize=True)

    def _schedule(self, initialize: bool = False) -> None:
        state = self.state
        self.schedule = self.recipe.scheduler(state.optimizer, state.total_steps, self.steps_per_epoch, initialize)

    def run(self) -> Outcome:
        state = self.state
        self._resume()
        with evaluating(self.teacher), ExitStack() as stack, progress_of("finetuning") as show:
            stack.callback(self.student.train().eval)
            for norm in self.norms:
                norm.train(self.recipe.train_batch_norm)
            show(state.steps, state.total_steps)
            if not state.errors:
                self._validate()
            while not self._is_over():
                self._epoch(state.steps // self.steps_per_epoch, show)
        self.student.zero_grad()
        state.take_best()
        loss, samples = state.totals[state.totals[:, 1] > 0].T
        return Outcome((loss / samples).tolist(), state.seconds, self.seconds_before, state.errors)

    @torch.no_grad()
    def _settle_modes(self, seed: tuple[int, ...], inputs: Any) -> None:
        """Put modules in evaluation mode that return other outputs in training mode, as those of auxiliary heads."""
        student, norms = self.student, [norm.training for norm in self.norms]
        for norm in self.norms:
            norm.eval()  # statistics stay as they are
        with seeded(*seed, device=self.device), autocast(self.device, self.recipe.autocast_type):
            with evaluating(student):
                expected = tree_structure(run(student, inputs))
            for module in student.modules():
                if tree_structure(run(student, inputs)) == expected:
                    break
                module.training &= not any(True for _ in module.children())
        for norm, is_trained in zip(self.norms, norms, strict=True):
            norm.train(is_trained)
        self.is_settled = True

    def _is_over(self) -> bool:
        return self.state.steps >= self.state.total_steps or not self._seconds_left()

    def _seconds(self) -> float:
        """Seconds since the start, plus those of an interrupted run up to its checkpoint."""
        return self.seconds_before + time.perf_counter() - self.start

    def _seconds_left(self) -> float:
        """Seconds that the recipe leaves for steps, the same in all processes.

        Time is reserved for a step, a checkpoint, an evaluation by `validate` here and two of the returned network.
        """
        if not self.recipe.minutes:
            return math.inf
        state = self.state
        to_come = self._seconds_of_step() + 3 * state.seconds_to_validate + state.seconds_to_save
        given = (1 - MARGIN) * 60 * self.recipe.minutes
        return distributed.all_gather(max(0.0, given - self._seconds() - to_come))[0]

    def _seconds_of_step(self) -> float:
        """Mean seconds per step so far, including evaluations and checkpoints; 0 before the second step."""
        steps, seconds = self.timed_from or (self.state.steps, 0.0)
        return (self._seconds() - seconds) / (self.state.steps - steps) if self.state.steps > steps else 0.0

    def _epoch(self, epoch: int, show: Show) -> None:
        """Train the remaining steps of an epoch."""
        first = self.state.steps % self.steps_per_epoch
        own = slice(first * self.recipe.accumulate + distributed.rank(), None, distributed.size())
        numbers = range(self.num_batches)[own]
        batches = iter(self.data.training(self.teacher, epoch, self.recipe.seed)[own])
        for step in range(first, self.steps_per_epoch):
            in_step = range(step * self.recipe.accumulate, (step + 1) * self.recipe.accumulate)
            chosen = [number for number in in_step if number in numbers]
            loss = self._step(epoch, list(zip(chosen, islice(batches, len(chosen)), strict=True)))
            self.timed_from = self.timed_from or (self.state.steps, self._seconds())
            show(self.state.steps, self.state.total_steps, f"{self.recipe.loss_name} {loss:.4g}")
            last = step + 1 == self.steps_per_epoch or self._is_over()
            if last:
                self._validate()
            to_save = last or self.state.steps % self.recipe.save_every == 0
            if self.recipe.minutes and (to_save or self.state.steps == NUM_TRIALS):
                self._plan()
            if to_save:
                self._save(epoch)
            if last:
                error = {"error": self.state.errors[-1]} if self.validate else {}
                report("finetuning", epoch=epoch + 1, loss=self._mean_loss(epoch), **error)
                return

    def _mean_loss(self, epoch: int) -> float:
        """Mean loss of the epoch so far."""
        loss, samples = self.state.totals[epoch].tolist()
        return loss / samples

    def _plan(self) -> None:
        """Set the total number of steps to what the remaining time allows, given the time per step so far."""
        each = self._seconds_of_step()
        affordable = self.state.steps + int(self._seconds_left() / each) if each else self.most_steps
        self.state.total_steps = distributed.all_gather(min(self.most_steps, affordable))[0]
        self._schedule()

    def _validate(self) -> None:
        """Measure the student's error, and keep its weights if it is the smallest so far."""
        if self.validate:
            start = time.perf_counter()
            self.state.note_error(self.validate(self.student))
            self.state.seconds_to_validate = time.perf_counter() - start

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
                f"the loss is {loss} in epoch {epoch}, step {state.steps}: lower learning_rate, or use precision "
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
        buffers = (buffer for norm in self.norms for buffer in (norm.running_mean, norm.running_var))
        statistics = [buffer for buffer in buffers if buffer is not None]
        distributed.all_reduce(statistics)
        for buffer in statistics:
            buffer /= distributed.size()

    def _add_gradients(self, seed: tuple[int, ...], batch: tuple[Any, Any], num_samples: int) -> Tensor:
        """Add the gradients of one batch's share in the step's mean loss; return that share."""
        inputs, targets = to_device(batch, self.device)
        try:
            if not self.is_settled:
                self._settle_modes(seed, inputs)
            with seeded(*seed, device=self.device), autocast(self.device, self.recipe.autocast_type):
                loss = self.recipe.loss(self.data, self.student, self.teacher, inputs, targets) / num_samples
            self.state.scaler.scale(loss).backward()
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"the device ran out of memory with a batch of {batch_size(inputs)} ({error}); divide batch_size and "
                "multiply accumulate by the same factor: a step then sees the same samples"
            ) from error
        return loss.detach()

    def _resume(self) -> None:
        if self.cache and (tensors := self.cache.load(self.checkpoint)):
            self.state.restore(tensors)
            self.seconds_before = self.state.seconds
            self._schedule()
            log.info("finetuning continues after step %d of %d", self.state.steps, self.state.total_steps)

    def _save(self, epoch: int) -> None:
        """Write a checkpoint, if they are kept, and log the progress, since a log file shows no progress bar."""
        state = self.state
        state.seconds = self._seconds()
        if self.cache:
            self.cache.save(self.checkpoint, state.tensors())
        state.seconds_to_save = self._seconds() - state.seconds
        left = timedelta(seconds=round(state.seconds / state.steps * (state.total_steps - state.steps)))
        log.info(
            "finetuning: step %d of %d, mean %s of epoch %d %.4g, %s left",
            state.steps, state.total_steps, self.recipe.loss_name, epoch + 1, self._mean_loss(epoch), left,
        )  # fmt: skip


@dataclass(frozen=True)
class Stages:
    """The backbone's first task, its retraining on that task, and the training of the whole network."""

    task: Task
    retraining: Finetuning
    training: Finetuning

    def identity(self) -> dict[str, Any]:
        recipes = {"retraining": self.retraining.identity(), "training": self.training.identity()}
        return {"task": repr(self.task), **recipes}


class Trained(NamedTuple):
    """A network trained on a compressed backbone, the ranks of the classifier's layers, and each stage's seconds."""

    model: nn.Module
    plan: Plan
    seconds: dict[str, float]


def train_in_stages(
    network: nn.Module,
    task: Task,
    stages: Stages,
    compress: Callable[[nn.Module, Iterable[Any]], CompressionResult],
    folder: Path | None = None,
) -> Trained:
    """Train a network like `network`, with new heads and a compressed backbone (paper, supplement, PELA).

    `compress(classifier, calibration_data)` compresses the classifier, which is retrained with the dense one as its
    teacher; then its backbone and untrained heads learn the task. Checkpoints are kept in `folder`.
    """
    seconds: dict[str, float] = {}
    device = next(network.parameters()).device
    classifier = network.recipe.classifier.build().to(device)
    result = compress(classifier, stages.task.calibration(classifier))
    with timed(seconds, "retraining"):
        finetune(result.model, classifier, stages.task, stages.retraining, folder)
    trained = untrained(network.recipe, result.model, stages.training.seed).to(device)
    with timed(seconds, "finetuning"):
        finetune(trained, network, task, stages.training, folder)
    return Trained(trained, result.plan, result.summary.method.seconds | seconds)
