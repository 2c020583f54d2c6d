"""Distance of a changed network's outputs from the original's."""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from facts.calibration.data import Batch
from facts.calibration.outputs import refuse_not_finite
from facts.modules.linear_calls import stand_in
from facts.modules.networks import autocast, evaluating, run
from facts.moments.losses import OutputError, SquaredError, in_chunks, kl_divergence, tensors_of
from facts.utils.batches import batch_size, in_parts, to_device

log = logging.getLogger(__name__)

TOO_FAR = 0.2  # a share; a ViT-Tiny lost 14 points of accuracy at a share of 0.13, and 41 points at 0.38
FEW = 8  # samples; with fewer the standard error is itself a guess
LEAST_INFORMATION = 1e-9  # nats per sample: a hundred times what rounding logits to float32 adds


@dataclass(frozen=True)
class Distance:
    """Mean error of the outputs over `num_samples`, and the `share` of the original outputs' information that is lost.

    A share of 1 is the error of constant outputs (KL divergence) or zeros (squared error). It is None for other
    errors, and if the original's outputs hardly depend on its inputs. `standard_error` of the mean is None for a single
    sample.
    """

    mean: float
    share: float | None
    num_samples: int
    standard_error: float | None = None

    @property
    def is_too_far(self) -> bool:
        """Whether the budget is too small for the network, as far as the distance shows."""
        return self.num_samples >= FEW and self.share is not None and not self.share <= TOO_FAR  # also true for NaN

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.2g}"
        on, far = f"on {self.num_samples:,} held-out samples", f"mean distance {self.mean:.4g}{error}"
        few = "; too few samples to tell" if self.num_samples < FEW else ""
        if self.share is None:
            return f"{on}, the outputs have a {far} from the original's{few}"
        return f"{on}, the outputs lose {self.share:.1%} of the original's information ({far}){few}"


def distance(
    original: nn.Module,
    changed: nn.Module,
    batches: Iterable[Batch],
    output_error: OutputError,
    precision: torch.dtype,
    num_parts: int = 1,
    originals: list[Any] | None = None,
) -> Distance | None:
    """Compare the outputs of two networks on batches, shared by all processes; None if there are no batches.

    `precision` is the autocast type; each batch is divided into `num_parts`. `originals` are the original's outputs, if
    an earlier call has computed them; an empty list is filled with them. Raises `ValueError` for an error that is not
    finite.
    """
    original, changed = stand_in(original), stand_in(changed)
    device, information, num_zero = next(changed.parameters()).device, _Information(), 0
    own: list[tuple[float, int]] = []  # error and number of samples: one each if outputs can be divided
    with torch.inference_mode(), evaluating(original), evaluating(changed), autocast(device, precision):
        parts = (part for inputs, _ in batches for part, _ in in_parts((inputs, None), num_parts))
        for number, part in enumerate(parts):
            part = to_device(part, device)
            if originals is not None and number == len(originals):
                originals.append(run(original, part))
            expected = run(original, part) if originals is None else originals[number]
            found = run(changed, part)
            refuse_not_finite(expected, found)
            samples = list(_by_sample((expected, found), batch_size(part)))
            own += [(output_error(*outputs).item(), size) for outputs, size in samples]
            if output_error is kl_divergence:
                information.add(expected)
            elif isinstance(output_error, SquaredError):
                kept = (tensors_of(outputs[0], output_error.names) for outputs, _ in samples)
                num_zero += sum(not any(each.any() for each in tensors) for tensors in kept)
    errors, sizes = torch.tensor(own, dtype=torch.float64).reshape(-1, 2).T
    if not len(sizes):
        return None
    if num_zero:
        log.warning(
            "outputs of %d samples are all zeros: their error is 1 if the changed ones are not, or else 0", num_zero
        )
    mean, num_samples = (errors.sum() / sizes.sum()).item(), int(sizes.sum())
    share = mean if isinstance(output_error, SquaredError) else None
    if output_error is kl_divergence and (known := information.total()) > LEAST_INFORMATION * num_samples:
        share = errors.sum().item() / known
    if not math.isfinite(mean):
        raise ValueError(
            f"the error of the outputs is {mean}, over {num_samples} samples: check that both networks' outputs are "
            "finite on these data"
        )
    deviations = (errors - mean * sizes).square().sum() * len(sizes) / (len(sizes) - 1)
    standard_error = deviations.sqrt().item() / num_samples if len(sizes) > 1 else None
    return Distance(mean, share, num_samples, standard_error)


def _by_sample(outputs: Any, size: int) -> Iterator[tuple[Any, int]]:
    """Divide outputs by sample if all tensors have a row for each of `size` samples; otherwise keep them whole."""
    if all(isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size for leaf in tree_leaves(outputs)):
        for row in range(size):
            yield tree_map_only(Tensor, lambda tensor: tensor[row : row + 1], outputs), 1  # noqa: B023
    else:
        yield outputs, size


class _Information:
    """Information in class logits: the sum over rows of their KL divergence from the mean distribution of all rows."""

    def __init__(self) -> None:
        self.distributions: Tensor | None = None  # sum over all rows, `[C]`
        self.known = self.num_rows = 0.0

    def add(self, logits: Tensor) -> None:
        for part in in_chunks(logits):
            logs = part.double().log_softmax(dim=-1)
            total = logs.exp().sum(dim=0).cpu()
            self.distributions = total if self.distributions is None else self.distributions + total
            self.known += (logs.exp() * logs).sum().item()
            self.num_rows += len(part)

    def total(self) -> float:
        """Total over the rows."""
        assert self.distributions is not None
        mean = self.distributions / self.num_rows
        return (self.known - self.num_rows * torch.special.xlogy(mean, mean).sum()).item()
