"""Distance of a changed network's outputs from the original's."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from facts.modules.modes import autocast, evaluating
from facts.modules.networks import run
from facts.moments.losses import KL_VALUES, OutputError, kl_divergence, squared_error
from facts.moments.statistics import at_least_tiny
from facts.utils.batches import batch_size, gathered, in_parts, shared, to_device

TOO_FAR = 0.2  # a share; a ViT-Tiny with a share of 0.13 was 14 points less accurate, one with 0.38 41 points


@dataclass(frozen=True)
class Distance:
    """Mean error of the outputs over `num_samples`, and the `share` of the original outputs' information that is lost.

    A share of 1 is the error of constant outputs (KL divergence) or of zero (squared error); None for other errors.
    """

    mean: float
    share: float | None
    num_samples: int

    @property
    def is_too_far(self) -> bool:
        """Whether the budget is too small for the network."""
        return self.share is not None and not self.share <= TOO_FAR  # NaN is

    def __str__(self) -> str:
        lost = "" if self.share is None else f": {self.share:.1%} of their information is lost"
        return f"outputs are {self.mean:.4g} from the original's, mean over {self.num_samples:,} samples{lost}"


def distance(
    original: nn.Module,
    changed: nn.Module,
    inputs: Iterable[Any],
    output_error: OutputError,
    precision: torch.dtype,
    num_parts: int = 1,
) -> Distance:
    """Compare the outputs of two networks on batches of inputs, which processes share.

    `precision` is the autocast type; each batch is divided into `num_parts`.
    """
    device, totals, information = next(changed.parameters()).device, torch.zeros(2, dtype=torch.float64), _Information()
    with torch.inference_mode(), evaluating(original), evaluating(changed), autocast(device, precision):
        for part, _ in (part for batch in shared(inputs, sums=[totals]) for part in in_parts((batch, None), num_parts)):
            part = to_device(part, device)
            expected = run(original, part)
            error = output_error(expected, run(changed, part))
            totals += torch.tensor([error.item(), batch_size(part)], dtype=torch.float64)
            if output_error is kl_divergence:
                information.add(expected)
    error, num_samples = totals.tolist()
    shares = {kl_divergence: lambda: error / information.total(), squared_error: lambda: error / num_samples}
    share = shares[output_error]() if output_error in shares else None
    return Distance(error / num_samples, share, int(num_samples))


class _Information:
    """Information in class logits: the sum over rows of their KL divergence from the mean distribution of all rows."""

    def __init__(self) -> None:
        self.distributions: Tensor | None = None  # the sum of all rows' `[C]`
        self.known = self.num_rows = 0.0

    def add(self, logits: Tensor) -> None:
        num_classes = logits.shape[-1]
        for part in logits.reshape(-1, num_classes).split(max(1, KL_VALUES // num_classes)):
            logs = part.double().log_softmax(dim=-1)
            total = logs.exp().sum(dim=0).cpu()
            self.distributions = total if self.distributions is None else self.distributions + total
            self.known += (logs.exp() * logs).sum().item()
            self.num_rows += len(part)

    def total(self) -> float:
        """The sum over the rows of all processes, some of which may have none."""
        own = [] if self.distributions is None else [(self.known, self.num_rows, self.distributions)]
        known, num_rows, distributions = map(sum, zip(*gathered(own), strict=True))
        mean = distributions / num_rows
        return at_least_tiny(known - num_rows * torch.special.xlogy(mean, mean).sum()).item()
