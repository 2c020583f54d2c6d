"""Loss for outputs that are features, not class logits; its gradients make up their Gauss-Newton matrix."""

from collections.abc import Collection, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from facts.modules.modes import autocast, evaluating
from facts.modules.networks import run
from facts.moments.losses import SampledTargets, tensors_of
from facts.utils.batches import batch_size, to_device
from facts.utils.cache import content_key

NUM_SAMPLES = 512  # on which scales are measured
LEAST_SCALE = 1e-3  # of the root mean square of all features: one that hardly varies would otherwise dominate


class SampledFeatures(SampledTargets):
    """Σ over samples of Σ ε f(x) / scale, with a fresh ε of unit variance for each sample and feature.

    The mean of g gᵀ over ε is the Gauss-Newton matrix Jᵀ M J, where M holds 1 / scale² of each feature. All tensors of
    the outputs count equally, each as the mean over its values. `scales` has one tensor `[D]` for each.
    """

    def __init__(self, scales: Collection[Tensor], names: Collection[str] = (), seed: int = 0, batch_number: int = 0):
        self.scales, self.names = tuple(scales), tuple(names)
        super().__init__(f"features {content_key(*self.scales, self.names)} sampled", __name__, seed, batch_number)

    def drawn(self, seed: int, batch_number: int = 0) -> Self:
        return type(self)(self.scales, self.names, seed, batch_number)

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        tensors = tensors_of(outputs, self.names)
        losses = []
        for values, scale in zip(map(features_last, tensors), self.scales, strict=True):
            noise = torch.randn(values.shape, generator=self.generator).to(values)
            count = len(tensors) * values[0].numel()
            losses.append((noise / scale.to(values) * values).sum() / count**0.5)
        return torch.stack(losses).sum()


def features_last(values: Tensor) -> Tensor:
    """Turn maps `[N, D, H, W]` into `[N, H, W, D]`; other outputs, `[N, D]` or `[N, T, D]`, have features last."""
    return values.movedim(1, -1) if values.ndim == 4 else values


def scales_of(
    model: nn.Module, batches: Iterable[tuple[Any, Any]], names: Collection[str], precision: torch.dtype
) -> list[Tensor]:
    """Standard deviations `[D]` of the output features over samples and positions, measured on the first samples."""
    device, sums, left = next(model.parameters()).device, list[Tensor](), NUM_SAMPLES
    with torch.no_grad(), evaluating(model), autocast(device, precision):
        for inputs, _ in batches:
            tensors = tensors_of(run(model, to_device(inputs, device)), names)
            rows = [features_last(values).flatten(0, -2).double() for values in tensors]
            own = [torch.stack([torch.ones_like(row[0]) * len(row), row.sum(0), row.square().sum(0)]) for row in rows]
            sums = [total + new for total, new in zip(sums, own, strict=True)] if sums else own
            left -= batch_size(inputs)
            if left <= 0:
                break
    scales = []
    for count, total, squares in sums:
        scale = (squares / count - (total / count).square()).clamp(min=0).sqrt()
        least = LEAST_SCALE * (squares / count).mean().sqrt()
        scales.append(scale.clamp(min=least.clamp(min=torch.finfo(torch.float64).tiny)))
    return scales
