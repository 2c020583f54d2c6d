"""Recovery of lost accuracy: the compressed network learns the original's outputs on inputs without labels."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from facts.calibration.data import Data
from facts.calibration.outputs import Distance, default_error, distance, refuse_unfit_network, refuse_unreadable
from facts.finetuning.recipe import Finetuning, Precision, Steps
from facts.finetuning.training import finetune, values_of
from facts.modules.linear_calls import copy_with, unwrapped
from facts.modules.networks import precision_of, type_of
from facts.moments.batch import at_least_float32
from facts.moments.losses import OutputError
from facts.result import CompressionResult, RecoverySummary
from facts.utils.batches import batch_size, has_row_per_sample, in_parts
from facts.utils.cache import calibration_key, content_key, name_of
from facts.utils.numerics import seeded
from facts.utils.options import Count, NotNegative, Positive, options

NUM_EPOCHS = 10  # if neither epochs nor minutes are given
MOST_EPOCHS = 100  # if only minutes are given
HALVES: dict[torch.dtype, Precision] = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
SMALLEST_AREA = 0.5  # fraction of the image that a random crop keeps at least
LEAST_TO_CHOOSE = 8  # samples that choose the best epoch, if a quarter of the data is that many
TOO_FEW = "recovery needs at least two samples: some to learn from, others to choose the best epoch"
ASPECT = 4 / 3  # largest ratio of its sides, before it is clipped to the image


@options
class Recovery(Steps):
    """A recipe for `facts.recover`: how long (`epochs`, `minutes`, or whichever ends first), and how.

    A step uses `accumulate` parts of at most `batch_size` samples; the rate falls along a cosine. With `views`, photos
    are randomly cropped and flipped. `held_back` is the approximate fraction of inputs, in whole parts, and eight at
    least if a quarter is that many, set aside to choose the best epoch. The `precision` `auto` is bfloat16 if the
    device is faster with it, otherwise float32. A network in half precision is trained with autocast to its own type,
    and weights in float32.
    """

    epochs: Count | None = None
    learning_rate: Positive = 1e-4
    num_warmups: Annotated[int, Field(ge=0)] = 30
    weight_decay: NotNegative = 0.0
    block_weight: NotNegative = 30.0
    clip_grad: Positive | None = 1.0
    batch_size: Count = 16
    views: bool = True
    held_back: Annotated[float, Field(gt=0, le=0.5)] = 0.1
    precision: Precision | Literal["auto"] = "auto"
    save_every: Count = 50

    def finetuning(self, network: nn.Module) -> Finetuning:
        """Make the recipe of the steps for a network: distillation only."""
        device, own_type = next(network.parameters()).device, type_of(network)
        chosen = fast_precision(device) if self.precision == "auto" else self.precision
        own = {field.name: getattr(self, field.name) for field in fields(Steps)}
        num_epochs = self.epochs or (MOST_EPOCHS if self.minutes else NUM_EPOCHS)
        return Finetuning(**own | {"precision": HALVES.get(own_type, chosen)}, num_epochs=num_epochs, alpha=1.0)

    def distill(
        self,
        network: nn.Module,
        original: nn.Module,
        data: tuple[Data, Data],
        output_error: OutputError,
        cache: Path | str | None = None,
    ) -> tuple[nn.Module, RecoverySummary, Distance | None]:
        """Train a copy of `network` towards the outputs of `original`.

        `data` are the samples to learn from and the held-out ones, as `Data.divided` returns them. Returns the copy, or
        `network` itself if the copy is no closer on the held-back samples; a summary; and the distance on the held-out
        samples, which are used neither to train nor to choose. Checkpoints are kept in `cache`, as in `finetune`.
        """
        start = time.perf_counter()
        to_learn, others = data
        held_out = list(others)
        inputs = DistillationData(to_learn, output_error, self.batch_size, self.held_back, self.views)
        student, precision = copy_with(network), precision_of(network)  # of the returned network

        def measured(model: nn.Module) -> Distance | None:
            return distance(original, model, held_out, output_error, precision)

        def error(model: nn.Module) -> float:
            return inputs.error(model, original, precision)

        before = measured(network)
        with in_float32(student):
            outcome = finetune(student, original, inputs, self.finetuning(network), cache, error, start)
        trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
        for name, parameter in student.named_parameters():  # all were trained
            parameter.requires_grad_(name in trained)
        chosen = student if error(student) < error(network) else network  # pivoted and in half precision again
        after = measured(chosen)
        summary = RecoverySummary(
            before=before.mean if before else None,
            after=after.mean if after else None,
            num_samples=inputs.num_samples,
            num_held_back=after.num_samples if after else 0,
            num_to_choose=sum(map(batch_size, inputs.held_back)),
            epochs=len(outcome.losses),
            seconds=outcome.seconds,
            seconds_before=outcome.seconds_before,
        )
        return chosen, summary, after


def recover(
    result: CompressionResult,
    data: Iterable[Any],
    *,
    minutes: float | None = None,
    epochs: int | None = None,
    original: nn.Module | None = None,
    output_error: OutputError | None = None,
    cache: Path | str | None = None,
    **options: Any,
) -> CompressionResult:
    """Recover a compressed network's accuracy without labels: it learns the original's outputs on `data`.

    `data` is a loader as in `facts.compress`; its samples come in the same order in every epoch, so shuffle them
    beforehand. All parameters are trained, for `epochs` (default: 10) or `minutes`, whichever ends first. The samples
    that `facts.compress` holds out of the same data are held out here too, to measure the distance before and after. A
    tenth of the others, eight at least if a quarter is that many, is used to choose the best epoch. `original` is the
    dense network (default: the one that was compressed; a loaded folder has none). `output_error(original, changed)` is
    the distance between outputs, summed over samples (default: that of the compression; for a loaded folder, as
    `facts.prepare` chooses it). `cache` is a folder for checkpoints: if the process is killed, the same call continues;
    with `epochs`, on a CPU, the result is bit-identical. `options` are the other fields of `facts.Recovery`.

    Returns a new result with the same cost and plan. Raises `ValueError` for options out of range, without an original,
    for a loss that is not finite, and data that differ from pass to pass; `MemoryError` if memory
    runs out.
    """
    if not isinstance(result, CompressionResult) or data is None:
        got = f"{type(result).__name__} and {type(data).__name__}"
        raise ValueError(f"recover needs a result of facts.compress and inputs to learn from, got {got}")
    refuse_unfit_network(result.model)
    recipe = Recovery(minutes=minutes, epochs=epochs, **options)
    original = result.original if original is None else unwrapped(original)
    if original is None:
        raise ValueError("this result does not hold the original network: give original=")
    given = Data.of(data, original, "recovery")
    refuse_unreadable(original, given, precision_of(original))
    work, held_out = given.divided()
    error = output_error or result.output_error or default_error(original, work)
    network, recovery, after = recipe.distill(result.model, original, (work, held_out), error, cache)
    seconds = {**result.summary.seconds, "recovery": recovery.seconds - recovery.seconds_before}
    return replace(
        result.with_summary(seconds=seconds, recovery=recovery, distance=after, predicted=None),
        model=copy_with(network) if network is result.model else network,
        original=original,
        output_error=error,
        held_out=held_out,
    )


def fast_precision(device: torch.device) -> Precision:
    """bfloat16 if the device has instructions for it, which at least halve the time of products; otherwise float32."""
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    able: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # which PyTorch 2.5 does not have
    return "bfloat16" if device.type == "cpu" and (able.get("avx512_bf16") or able.get("amx_bf16")) else "float32"


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Convert half-precision tensors to float32 within the block: rounding would swallow small steps."""
    types = {name: tensor.dtype for name, tensor in values_of(model).items() if tensor.dtype in HALVES}
    for name, tensor in values_of(model).items():
        if name in types:
            tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for name, tensor in values_of(model).items():  # the block may have replaced modules
            if name in types:
                tensor.data = tensor.data.to(types[name])


class DistillationData:
    """Inputs of batches, in parts of at most `part_size` samples; a fraction of about `held_back` is for validation.

    The parts come in the order of the data, the same in every epoch. `views` randomly crops and flips photos. The data
    are first read here, to set parts aside. Raises `ValueError` if they cannot be divided into parts to train on and to
    hold back.
    """

    def __init__(self, data: Data, output_error: OutputError, part_size: int, held_back: float, views: bool):
        self.data, self.output_error, self.views = data, output_error, views
        self.settings = part_size, held_back, views
        self.part_size, self.every = part_size, max(2, round(1 / held_back))
        first = list(islice(self._parts(), 2))
        if len(first) == 1 and has_row_per_sample(first[0]):  # one part to learn from, and one to judge by
            self.part_size = -(-batch_size(first[0]) // 2)
        sizes = self._divide()
        if len(sizes) < 2:
            raise ValueError(TOO_FEW)
        least = max(1, min(LEAST_TO_CHOOSE, sum(sizes) // 4))
        if sum(sizes[self.every - 1 :: self.every]) < least:
            possible = range(min(self.every, len(sizes)), 1, -1)
            self.every = next((every for every in possible if sum(sizes[every - 1 :: every]) >= least), 2)
            self._divide()
        self.num_training_parts = len(sizes) - len(self.held_back)
        self.num_samples = sum(sizes) - sum(map(batch_size, self.held_back))

    def _divide(self) -> list[int]:
        """Keep the parts that are held back. Returns the size of every part."""
        self.held_back: list[Any] = []
        self.keys: dict[int, str] = {}  # hashes of the first part and of the held-back ones, by number
        sizes = []
        for number, part in enumerate(self._parts()):
            sizes.append(batch_size(part))
            if number == 0 or self._is_held_back(number):
                self.keys[number] = content_key(part)
            if self._is_held_back(number):
                self.held_back.append(tree_map_only(Tensor, torch.clone, part))  # a view would keep the whole batch
        return sizes

    def _is_held_back(self, number: int) -> bool:
        return number % self.every == self.every - 1

    def content_key(self, model: nn.Module) -> str:
        error = name_of(self.output_error, "output_error")
        return content_key(calibration_key(self.data), error, *self.settings)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        raise NotImplementedError("inputs without labels have no loss of their own")

    def training(self, model: nn.Module, epoch: int, seed: int = 0) -> "Epoch":
        return Epoch(self, (seed, epoch), range(self.num_training_parts))

    def error(self, student: nn.Module, teacher: nn.Module, precision: torch.dtype) -> float:
        """Mean error of the student's outputs on the held-back parts."""
        held_back = [(part, None) for part in self.held_back]
        found = distance(teacher, student, held_back, self.output_error, precision)
        assert found is not None
        return found.mean

    def parts_to_train_on(self) -> Iterator[Any]:
        """Yield the parts that are not held back. Raises `ValueError` if the data differ from the first reading."""
        for number, part in enumerate(self._parts()):
            is_held_back = self._is_held_back(number)
            if (number == 0 or is_held_back) and content_key(part) != self.keys.get(number):
                raise ValueError(
                    "the data differ from pass to pass, so nothing can be held back: their dataset draws random "
                    "numbers of its own, which a list of batches does not (`views` crops and flips photos)"
                )
            if not is_held_back:
                yield part

    def _parts(self) -> Iterator[Any]:
        """Yield each batch's inputs in parts of at most `part_size` samples, or whole if they cannot be divided."""
        for inputs, _ in self.data:
            num_parts = -(-batch_size(inputs) // self.part_size) if has_row_per_sample(inputs) else 1
            yield from (part for part, _ in in_parts((inputs, None), num_parts))


@dataclass(frozen=True)
class Epoch:
    """The parts of one epoch with these `numbers`, each with its own views; the others are read and skipped."""

    inputs: DistillationData
    seed: tuple[int, ...]
    numbers: range

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, part: slice) -> "Epoch":
        return replace(self, numbers=self.numbers[part])

    def __iter__(self) -> Iterator[tuple[Any, None]]:
        chosen = self.numbers
        own = islice(self.inputs.parts_to_train_on(), chosen.start, chosen.stop, chosen.step)
        for number, part in zip(chosen, own, strict=True):
            if self.inputs.views and _is_one_photo_each(part):
                with seeded(*self.seed, number):
                    part = tree_map_only(Tensor, random_views, part)
            yield part, None


def _is_one_photo_each(part: Any) -> bool:
    """Check that a part is colour images `[N, 3, H, W]` and nothing else that would need the same crop."""
    tensors = [leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor)]
    return len(tensors) == 1 and tensors[0].ndim == 4 and tensors[0].is_floating_point() and tensors[0].shape[1] == 3


def random_views(images: Tensor) -> Tensor:
    """Crop each image `[N, C, H, W]`, flip it with probability one half, and resize it bilinearly to the same size.

    Both networks see the same view, so no label can be wrong.
    """
    exact = at_least_float32(images)  # half precision has too few bits for positions
    draws = torch.rand(5, len(exact), dtype=exact.dtype, device=exact.device)
    area, aspect = 1 - (1 - SMALLEST_AREA) * draws[0], ASPECT ** (2 * draws[1] - 1)
    width, height = ((area * by).sqrt().clamp(max=1) for by in (aspect, 1 / aspect))
    flip = 1 - 2 * (draws[2] < 0.5).to(exact)
    right, down = (1 - width) * (2 * draws[3] - 1), (1 - height) * (2 * draws[4] - 1)
    zero = torch.zeros_like(width)
    matrices = torch.stack([torch.stack([flip * width, zero, right], 1), torch.stack([zero, height, down], 1)], 1)
    grid = F.affine_grid(matrices, list(exact.shape), align_corners=False)
    return F.grid_sample(exact, grid, padding_mode="border", align_corners=False).to(images)
