"""Training: steps, checkpoints and progress; pivoted layers are trained as plain factors."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_structure

from facts.decomposition.truncation import product_singular_values
from facts.finetuning.recipe import Finetuning, TrainingData
from facts.modules.forms import PivotedLinear, arithmetic_of, pivoted_layer
from facts.modules.linear_calls import replace_submodule
from facts.modules.lowrank import LowRankLinear
from facts.modules.networks import autocast, evaluating, run, without_autocast
from facts.utils import distributed
from facts.utils.batches import batch_size, to_device
from facts.utils.cache import Cache, content_key, optimizer_tensors, restore_optimizer
from facts.utils.numerics import seeded
from facts.utils.progress import Show, progress_of, report

log = logging.getLogger(__name__)

Validate = Callable[[nn.Module], float]
"""Maps a network, in any mode, to its error on samples that it is not trained on, the same in all processes."""

NUM_TRIALS = 4  # steps to estimate how many fit into the given minutes; the first of them is not timed
MARGIN = 0.02  # fraction of the given minutes for work that is not timed


@dataclass(frozen=True)
class Outcome:
    """The mean loss of each epoch, and seconds of training, `seconds_before` of them before an interruption.

    `errors` are those measured by `validate` before the training and after each epoch.
    """

    losses: list[float]
    seconds: float
    seconds_before: float
    errors: list[float]


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
        for parameter in self.student.parameters():  # some may be indices
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
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
        with evaluating(self.teacher), ExitStack() as stack, progress_of("finetuning steps") as show:
            stack.callback(self.student.train().eval)
            for norm in self.norms:
                norm.train(self.recipe.train_batch_norm)
            show(state.steps, self._known_total)
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
        student = self.student
        with ExitStack() as stack, seeded(*seed, device=self.device), autocast(self.device, self.recipe.autocast_type):
            for norm in self.norms:
                stack.enter_context(evaluating(norm))  # statistics stay as they are
            with evaluating(student):
                expected = tree_structure(run(student, inputs))
            for module in student.modules():
                if tree_structure(run(student, inputs)) == expected:
                    break
                module.training &= not any(True for _ in module.children())
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
            show(self.state.steps, self._known_total, f"epoch {epoch + 1}, loss {loss:.4g}")
            last = step + 1 == self.steps_per_epoch or self._is_over()
            if last:
                self._validate()
            to_save = last or self.state.steps % self.recipe.save_every == 0
            if self.recipe.minutes and (to_save or self.state.steps == NUM_TRIALS):
                self._plan()
            if to_save:
                self._save()
            if last:
                error = {"error": self.state.errors[-1]} if self.validate else {}
                total, samples = self.state.totals[epoch].tolist()
                report("finetuning", epoch=epoch + 1, loss=total / samples, **error)
                return

    @property
    def _known_total(self) -> int | None:
        """Number of steps; None while training by the clock has not timed its first steps."""
        is_known = self.recipe.minutes is None or self.state.steps > NUM_TRIALS
        return self.state.total_steps if is_known else None

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

    def _step(self, epoch: int, batches: list[tuple[int, tuple[Any, Any]]]) -> float:
        """Update the weights once, from all processes' batches, each with its number. Returns the mean loss."""
        state, recipe = self.state, self.recipe
        num_samples = sum(distributed.all_gather(sum(batch_size(inputs) for _, (inputs, _) in batches)))
        parameters = [parameter for parameter in self.student.parameters() if parameter.requires_grad]
        for parameter in parameters:  # zeros rather than None: a process may have no batch left
            parameter.grad = torch.zeros_like(parameter)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, batch in batches:
            total += self._add_gradients((recipe.seed, epoch, number), batch, num_samples)
        distributed.all_reduce([total, *(parameter.grad for parameter in parameters if parameter.grad is not None)])
        loss = total.item()
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss is {loss} in epoch {epoch}, step {state.steps}: check that the inputs are finite, lower "
                "learning_rate, or use precision float32 or bfloat16"
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

    def _save(self) -> None:
        """Write a checkpoint, if they are kept."""
        state = self.state
        state.seconds = self._seconds()
        if self.cache:
            self.cache.save(self.checkpoint, state.tensors())
        state.seconds_to_save = self._seconds() - state.seconds


class State:
    """Student, AdamW, loss scale, numbers of `steps` done and planned, and `totals` [epochs, 2] of loss and samples.

    `errors` holds the errors measured so far, `best` the weights with the smallest one, `seconds` the time of all work
    up to the last checkpoint. Random draws have no state: each batch has its own seed.
    """

    def __init__(self, student: nn.Module, recipe: Finetuning, total_steps: int):
        self.student = student
        # DeiT's groups: biases, norms and the parameters that the network itself lists do not decay.
        self.optimizer = create_optimizer_v2(
            student, "adamw", lr=recipe.learning_rate, weight_decay=recipe.weight_decay
        )
        if recipe.backbone_scale != 1:  # in groups whose rate timm's schedules multiply by `lr_scale`
            slow = set(student.backbone.parameters())
            for group in list(self.optimizer.param_groups):
                own = [parameter for parameter in group["params"] if parameter in slow]
                group["params"] = [parameter for parameter in group["params"] if parameter not in slow]
                self.optimizer.add_param_group({**group, "params": own, "lr_scale": recipe.backbone_scale})
        device = next(student.parameters()).device
        self.scaler = torch.amp.GradScaler(device.type, enabled=recipe.precision == "float16")
        self.steps, self.total_steps = 0, total_steps
        self.totals = torch.zeros(recipe.num_epochs, 2, dtype=torch.float64)
        self.seconds = self.seconds_to_validate = self.seconds_to_save = 0.0
        self.errors: list[float] = []
        self.best: dict[str, Tensor] = {}

    def note_error(self, error: float) -> None:
        """Record an error, and keep the weights if it is the smallest so far."""
        error = math.inf if math.isnan(error) else error
        if not self.errors or error < min(self.errors):
            self.best = {name: tensor.detach().clone() for name, tensor in values_of(self.student).items()}
        self.errors.append(error)

    @torch.no_grad()
    def take_best(self) -> None:
        """Give the student the weights with the smallest error, if any was recorded."""
        for name, tensor in values_of(self.student).items() if self.best else ():
            tensor.data = self.best[name].clone()  # an expanded buffer cannot be written

    def tensors(self) -> dict[str, Tensor]:
        return {
            **{f"student/{name}": tensor.detach() for name, tensor in values_of(self.student).items()},
            **{f"adamw/{name}": tensor for name, tensor in optimizer_tensors(self.optimizer).items()},
            **{f"scaler/{key}": torch.tensor(value) for key, value in self.scaler.state_dict().items()},
            **{f"best/{name}": tensor for name, tensor in self.best.items()},
            "steps": torch.tensor([self.steps, self.total_steps]),
            "totals": self.totals,
            "seconds": torch.tensor(
                [self.seconds, self.seconds_to_validate, self.seconds_to_save], dtype=torch.float64
            ),
            "errors": torch.tensor(self.errors, dtype=torch.float64),
        }

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        # Copies: a file's tensors begin anywhere, and on CPUs without AVX-512, products depend on where one begins.
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        for name, tensor in values_of(self.student).items():
            tensor.data = tensors[f"student/{name}"].to(tensor)
            if f"best/{name}" in tensors:
                self.best[name] = tensors[f"best/{name}"].to(tensor.device)
        restore_optimizer(self.optimizer, _below("adamw/", tensors))
        if scaler := {key: tensor.item() for key, tensor in _below("scaler/", tensors).items()}:
            self.scaler.load_state_dict(scaler)
        self.steps, self.total_steps = tensors["steps"].tolist()
        self.seconds, self.seconds_to_validate, self.seconds_to_save = tensors["seconds"].tolist()
        self.totals, self.errors = tensors["totals"], tensors["errors"].tolist()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """List parameters and buffers, unsaved ones too, each once: some networks register one under several names."""
    return dict(chain(model.named_parameters(), model.named_buffers()))


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@contextmanager
def plain_factors(model: nn.Module) -> Iterator[None]:
    """Replace every pivoted layer by two factors within the block, and the factors by a pivoted layer afterwards.

    Both forms reach the same weights, but a small step of a pivot or a coefficient can be a large step of the weight.
    If the pivots were permuted, new ones are chosen for half precision again. After an error the factors remain.
    """
    pivoted = {name: module for name, module in model.named_modules() if isinstance(module, PivotedLinear)}
    for name, layer in pivoted.items():
        u, s, vh = product_singular_values(*(factor.detach().double() for factor in layer.factors()))
        left, right = u * s.sqrt(), s.sqrt()[:, None] * vh  # with equal singular values
        replace_submodule(model, name, LowRankLinear(left.to(layer.basis), right.to(layer.basis), layer.bias))
    yield
    for name, layer in pivoted.items():
        factors = model.get_submodule(name)
        assert isinstance(factors, LowRankLinear)
        precision = torch.float32 if layer.order is None else torch.bfloat16
        arithmetic = arithmetic_of(factors.left, precision)
        pivots = pivoted_layer(factors.left, factors.right, factors.bias, arithmetic=arithmetic)
        replace_submodule(model, name, pivots)
