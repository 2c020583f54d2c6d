"""Recipes for finetuning, and the losses that they minimise."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import Field
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from facts.modules.lowrank import LowRankLayer
from facts.modules.networks import blocks_of, hooked, run
from facts.moments.batch import at_least_float32
from facts.moments.statistics import at_least_tiny
from facts.utils.batches import Batches, batch_size
from facts.utils.options import Count, NotNegative, Positive, Share, options

Precision = Literal["float32", "bfloat16", "float16"]


class TrainingData(Protocol):
    """Batches to train on, and losses to minimise: a task, or the inputs of `facts.recover`."""

    def training(self, model: nn.Module, epoch: int, seed: int = 0) -> Batches: ...
    def loss(self, outputs: Any, targets: Any) -> Tensor: ...
    def output_error(self, original: Any, changed: Any) -> Tensor: ...
    def content_key(self, model: nn.Module) -> str: ...


@options
class Steps:
    """Fields of both `Finetuning` and `Recovery`: the steps of AdamW.

    The rate rises to `learning_rate` over `num_warmups` steps, at most a fifth of all. A step uses `accumulate`
    batches, whatever the number of processes. The loss includes `block_weight` times the relative squared errors of the
    outputs of blocks with low-rank or narrower layers, summed over blocks. `minutes` limits the time, and the schedule
    ends with it: the number of steps is estimated after the first few and at each checkpoint. `precision` is the
    autocast type of both networks; float16 scales the loss. A checkpoint is written every `save_every` steps and after
    each epoch. `seed` determines the order of the data, augmentation and dropout.
    """

    minutes: Positive | None = None
    learning_rate: Positive = 8.7e-6
    num_warmups: Annotated[int, Field(ge=0)] = 0
    weight_decay: NotNegative = 0.05
    block_weight: NotNegative = 0.0
    accumulate: Count = 1
    clip_grad: Positive | None = None
    precision: Precision | Literal["auto"] = "float32"
    save_every: Count = 500
    seed: Annotated[int, Field(ge=0)] = 0

    def identity(self) -> dict[str, Any]:
        """Fields that the weights depend on: all except `save_every`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "save_every"}


@options
class Finetuning(Steps):
    """AdamW on DeiT's soft distillation loss, by default with a cosine schedule and no warm-up.

    `learning_rate` (8.7e-6 for one epoch; 1e-4 over five for pruned networks) and the loss are the paper's; `alpha` and
    `weight_decay` are DeiT's.

    The rate falls to 0 by a `cosine` or a `linear` schedule (UPerNet's 160,000 iterations), or to a tenth after each of
    `decay_epochs` with `steps` (detectors' 1x schedule: after 8 and 11 of 12). `backbone_scale` multiplies the rate of
    a part called `backbone`, to protect it while new heads learn. With `train_batch_norm`, meant for layers that were
    never trained, BatchNorm normalises by the batch and updates its running statistics.
    """

    num_epochs: Count = 1
    schedule: Literal["cosine", "linear", "steps"] = "cosine"
    decay_epochs: tuple[Count, ...] = ()
    alpha: Share = 0.5
    precision: Precision = "float32"
    train_batch_norm: bool = False
    backbone_scale: Positive = 1.0

    def __post_init__(self):
        if (self.schedule == "steps") != bool(self.decay_epochs):
            raise ValueError(f"decay_epochs do not fit schedule={self.schedule}: give them with schedule=steps alone")

    @property
    def autocast_type(self) -> torch.dtype:
        return getattr(torch, self.precision)

    def scheduler(
        self, optimizer: Optimizer, total_steps: int, steps_per_epoch: int, initialize: bool = False
    ) -> Scheduler:
        """Make the schedule of learning rates for `total_steps` steps; it starts from the optimizer's initial ones."""
        common: dict[str, Any] = {"warmup_prefix": False, "t_in_epochs": False, "initialize": initialize}
        common["warmup_t"] = min(self.num_warmups, total_steps // 5)
        match self.schedule:
            case "steps":
                decays = [epoch * steps_per_epoch + 1 for epoch in self.decay_epochs]  # timm applies them a step early
                return MultiStepLRScheduler(optimizer, decays, decay_rate=0.1, **common)
            case "linear":
                return PolyLRScheduler(optimizer, total_steps, power=1.0, **common)
            case "cosine":
                return CosineLRScheduler(optimizer, total_steps, **common)

    def loss(self, data: TrainingData, student: nn.Module, teacher: nn.Module, inputs: Any, targets: Any) -> Tensor:
        """(1 - alpha) times the loss on labels + alpha times the distance from the teacher, summed over samples.

        For class logits the distance is KL(teacher ‖ student), as in the DeiT paper; DeiT's code also divides by the
        number of classes. With an alpha of 1, no labels are read.
        """
        matched = compressed_blocks(student, teacher) if self.block_weight else []
        parts = []
        with recorded_outputs(student, matched) as of_blocks:
            outputs = run(student, inputs)
        if self.alpha < 1:
            parts.append((1 - self.alpha) * data.loss(outputs, targets))
        if self.alpha or matched:
            with torch.no_grad(), recorded_outputs(teacher, matched) as originals:
                original = run(teacher, inputs)
        if self.alpha:
            parts.append(self.alpha * data.output_error(original, outputs))
        if matched:
            parts.append(self.block_weight * matching_error(originals, of_blocks, batch_size(inputs)))
        return sum(parts[1:], start=parts[0])


def compressed_blocks(model: nn.Module, original: nn.Module) -> list[str]:
    """Find the names of blocks with low-rank or narrower layers; of the low-rank layers, if they are in no block."""
    shapes = {name: module.weight.shape for name, module in original.named_modules() if isinstance(module, nn.Linear)}
    low_rank = [module for module in model.modules() if isinstance(module, LowRankLayer)]
    linears = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    narrower = [module for name, module in linears if shapes.get(name) != module.weight.shape]
    found = blocks_of(model, [*low_rank, *narrower]) or low_rank
    return [name for name, module in model.named_modules() if module in found]


@contextmanager
def recorded_outputs(model: nn.Module, names: Sequence[str]) -> Iterator[list[Tensor]]:
    """Collect the output of each call of these modules within the `with` block in a list, in order.

    Raises `ValueError` for a name that the network does not have.
    """
    outputs: list[Tensor] = []
    modules = dict(model.named_modules())

    def note(module: nn.Module, args: tuple, output: object) -> None:
        outputs.append(next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)))

    if missing := [name for name in names if name not in modules]:
        raise ValueError(f"the original has no {missing[0]}: give the network that was compressed, or block_weight=0")
    with hooked([(modules[name], note) for name in names]):
        yield outputs


def matching_error(originals: list[Tensor], changed: list[Tensor], num_samples: int) -> Tensor:
    """Σ over samples and outputs of ‖changed - original‖² / ‖original‖².

    Outputs whose shapes differ, as after pruning a width that all blocks share, are skipped.
    """
    errors = []
    for pair in zip(originals, changed, strict=True):
        if pair[0].shape != pair[1].shape:
            continue
        original, other = (at_least_float32(output).reshape(num_samples, -1) for output in pair)
        errors.append(((other - original).square().sum(1) / at_least_tiny(original.square().sum(1))).sum())
    return torch.stack(errors).sum() if errors else torch.zeros(())
