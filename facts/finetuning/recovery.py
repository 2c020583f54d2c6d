"""Recovery: the original teaches the compressed network, on inputs without labels."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import nn

from facts.compression.data import as_batches
from facts.compression.result import CompressionResult, RecoverySummary
from facts.finetuning.inputs import Inputs
from facts.finetuning.precision import HALVES, in_float32
from facts.finetuning.recipe import Count, Finetuning, NotNegative, Positive
from facts.finetuning.training import finetune
from facts.modules.linear_calls import copy_with
from facts.moments.losses import OutputError, kl_divergence
from facts.utils.batches import batch_size

NUM_EPOCHS = 10  # if neither epochs nor minutes are given
MOST_EPOCHS = 10_000  # if minutes alone are given


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Recovery:
    """A recipe for `facts.recover`: how long (`epochs`, `minutes`, or whichever ends first), and how.

    AdamW takes steps of `accumulate` parts of at most `batch_size` samples, which processes of torchrun share, at
    `learning_rate`, which falls along a cosine. With `views`, photos
    are seen in random crops and flips. `held_back` is the fraction of the inputs by which the network is judged.
    `precision` is the autocast type of both networks; one in half precision runs in its own, and its weights are
    float32 meanwhile. A checkpoint is written every `save_every` steps and after each epoch.
    """

    epochs: Count | None = None
    minutes: Positive | None = None
    learning_rate: Positive = 1e-4
    weight_decay: NotNegative = 0.0
    batch_size: Count = 32
    accumulate: Count = 1
    views: bool = True
    held_back: Annotated[float, Field(gt=0, le=0.5)] = 0.1
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    save_every: Count = 50
    seed: Annotated[int, Field(ge=0)] = 0

    def identity(self) -> dict[str, Any]:
        """Fields that the weights depend on: all but when checkpoints are written."""
        return self.finetuning.identity() | {
            "batch_size": self.batch_size,
            "views": self.views,
            "held_back": self.held_back,
        }

    @property
    def finetuning(self) -> Finetuning:
        """The recipe of the steps: distillation alone."""
        return Finetuning(
            num_epochs=self.epochs or (MOST_EPOCHS if self.minutes else NUM_EPOCHS),
            minutes=self.minutes,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            alpha=1.0,
            accumulate=self.accumulate,
            precision=self.precision,
            save_every=self.save_every,
            seed=self.seed,
        )

    def teach(
        self,
        student: nn.Module,
        teacher: nn.Module,
        data: Iterable[Any],
        output_error: OutputError,
        folder: Path | str | None = None,
    ) -> RecoverySummary:
        """Train `student` in place towards the outputs of `teacher`; it ends no further from them on what is held back.

        Checkpoints are kept in `folder`, as by `finetune`.
        """
        batches = as_batches(data, teacher)
        assert batches is not None
        inputs = Inputs.of(batches, output_error, self.batch_size, self.held_back, self.views)
        own = HALVES.get(next(student.parameters()).dtype, self.precision)
        recipe = replace(self.finetuning, precision=own)

        def error(model: nn.Module) -> float:
            return inputs.error(model, teacher, recipe.autocast_type)

        with in_float32(student):
            outcome = finetune(student, teacher, inputs, recipe, folder, error)
        return RecoverySummary(
            before=outcome.errors[0],
            after=min(outcome.errors),
            num_samples=inputs.num_samples,
            num_held_back=sum(map(batch_size, inputs.held_back)),
            epochs=len(outcome.losses),
            seconds=outcome.seconds,
        )

    def improve(
        self, result: CompressionResult, data: Iterable[Any], folder: Path | str | None = None
    ) -> CompressionResult:
        """Teach a copy of the compressed network. Raises `ValueError` if the result does not hold its original."""
        if result.original is None:
            raise ValueError("this result does not hold the network that it was made from: give original=")
        student = copy_with(result.model)
        recovery = self.teach(student, result.original, data, result.output_error or kl_divergence, folder)
        seconds = {**result.summary.seconds, "recovery": recovery.seconds}
        summary = replace(result.summary, recovery=recovery, seconds=seconds)
        return replace(result, model=student, summary=summary)


def recover(
    result: CompressionResult,
    data: Iterable[Any],
    *,
    minutes: float | None = None,
    epochs: int | None = None,
    original: nn.Module | None = None,
    output_error: OutputError | None = None,
    folder: Path | str | None = None,
    **options: Any,
) -> CompressionResult:
    """Let the original teach a compressed network, without labels: its outputs on `data` are what is to be matched.

    `data` is a loader as in `facts.compress`, often the same one; labels are not read. All parameters are trained, for
    `epochs` (default: 10) or `minutes`, whichever ends first. A tenth of the data is held back and tells when to stop:
    the result is never further from the original on it than before. `original` is the dense network (default: the one
    that was compressed; a loaded folder has none). `output_error(original, changed)` is the distance of outputs, a sum
    over samples (default: that of the compression). `folder` keeps checkpoints: if the process is killed, the same call
    continues, on a CPU to the same bits. `options` are the other fields of `facts.Recovery`.

    Returns a new result; cost and plan are the same. Raises `ValueError` for options out of range, if there is no
    original, and if the loss is not finite.
    """
    recipe = Recovery(minutes=minutes, epochs=epochs, **options)
    if original:
        result = replace(result, original=original)
    if output_error:
        result = replace(result, output_error=output_error)
    return recipe.improve(result, data, folder)
