"""How a network is finetuned."""

from dataclasses import fields
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from facts.modules.networks import run
from facts.tasks import Task

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Finetuning:
    """AdamW on DeiT's soft distillation loss, at a rate that falls along a cosine, without warm-up.

    The paper's are `learning_rate` of one epoch (8.7e-6; 1e-4 in five epochs for pruned networks), the loss and the
    missing warm-up. DeiT's are `alpha`, `temperature`, `weight_decay` and no `clip_grad`. `min_learning_rate` is that
    of Isomorphic Pruning's code, whose recipe the paper follows; it lowers the rate by epoch, so that one epoch would
    keep it: `min_learning_rate` = `learning_rate` does that.

    A step sees `accumulate` of the task's batches, however many processes share them. `precision` is the autocast type
    of both networks, float16 with a scaled loss. A checkpoint is written each `save_every` steps and after each epoch.
    `backbone_scale` multiplies the rate in a part called `backbone`, which is there to be spoilt while new heads learn.
    `seed` is that of the order of the data, of augmentation and of dropout. `train_batch_norm` is for networks with
    layers that were never trained: BatchNorm then normalises by the batch, and the statistics it keeps follow.
    """

    num_epochs: Count = 1
    learning_rate: Positive = 8.7e-6
    min_learning_rate: NotNegative = 0.0
    weight_decay: NotNegative = 0.05
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    temperature: Positive = 1.0
    accumulate: Count = 1
    clip_grad: Positive | None = None
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    train_batch_norm: bool = False
    backbone_scale: Positive = 1.0
    save_every: Count = 500
    seed: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self):
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate {self.min_learning_rate} is what learning_rate {self.learning_rate} falls to: it "
                "must not lie above it"
            )

    @property
    def autocast_type(self) -> torch.dtype:
        return getattr(torch, self.precision)

    def identity(self) -> dict[str, Any]:
        """What the weights depend on: not when checkpoints are written."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "save_every"}

    def loss(self, task: Task, student: nn.Module, teacher: nn.Module, inputs: Any, targets: Any) -> Tensor:
        """(1 - alpha) times the task's loss + alpha times the distance from the teacher, sums over samples.

        For class logits the distance is temperature² KL(teacher / temperature ‖ student / temperature), by sample as
        in the paper on DeiT; its code divides by the number of classes as well.
        """
        outputs = run(student, inputs)
        loss = (1 - self.alpha) * task.loss(outputs, targets)
        if not self.alpha:
            return loss
        with torch.no_grad():
            original = run(teacher, inputs)
        return loss + self.alpha * task.distillation_error(original, outputs, self.temperature)
