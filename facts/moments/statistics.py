"""The moments: each is a sum over batches, named after what it sums.

Legend: N samples, T tokens, n = d_in, m = d_out; D_k = Σ_t g_t x_tᵀ `[m, n]` is the weight gradient of sample k.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from facts.moments.batch import LayerBatch, add_symmetric, mirror
from facts.utils.cache import Cache, file_name

GradClip = float | Literal["median", "tokens"] | None
Normalize = Literal["none", "batch"]


@dataclass(frozen=True)
class Moment(ABC):
    """A sum over batches whose size does not grow with their number. Moments with equal fields are collected once."""

    needs_grads: ClassVar[bool] = True
    is_kept: ClassVar[bool] = True  # whether the cache keeps it
    takes_heads: ClassVar[bool] = False  # whether it adds all heads at once, `[H, N, T, d]`, to a sum with an axis H
    can_offload: ClassVar[bool] = True  # whether it may accumulate in main memory instead of on the device

    @abstractmethod
    def shapes(self, d_in: int, d_out: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors that make up the sum."""

    def num_held(self, d_in: int, d_out: int) -> int:
        """Number of values on the device while the sum accumulates."""
        return sum(math.prod(shape) for shape in self.shapes(d_in, d_out))

    def init_state(self, layer: str, like: Tensor, d_in: int, d_out: int) -> Any:
        """Make an empty sum for a layer, with the type and device of `like`."""
        return tuple(like.new_zeros(shape) for shape in self.shapes(d_in, d_out))

    @abstractmethod
    def add(self, total: Any, batch: LayerBatch) -> None:
        """Add one batch, in place."""

    def reducible(self, total: Any, num_samples: int) -> tuple[Tensor, ...]:
        """The tensors of a total that accumulate; adding them up joins totals over parts of `num_samples` samples."""
        return total

    def finalize(self, total: Any) -> Any:
        """Convert the sum to the form that estimators read, in place if it is large."""
        return total

    def save(self, cache: Cache, totals: dict[str, Any]) -> None:
        cache.save(file_name(self), {f"{name}/{i}": t for name, total in totals.items() for i, t in enumerate(total)})

    def load(self, cache: Cache, layers: Iterable[str]) -> dict[str, Any] | None:
        """Load saved sums into main memory; None if there are none."""
        tensors = cache.load(file_name(self))
        if tensors is None:
            return None
        num_tensors = len(self.shapes(0, 0))
        return {name: tuple(tensors[f"{name}/{i}"] for i in range(num_tensors)) for name in layers}


class Counts(Moment):
    """Numbers of samples and of tokens `[2]`, in main memory."""

    needs_grads = False
    takes_heads = True

    def shapes(self, d_in, d_out):
        return ((2,),)

    def init_state(self, layer, like, d_in, d_out):
        return (torch.zeros(2, dtype=torch.float64),)  # float32 is exact for whole numbers only up to 2^24

    def add(self, total, batch):
        num_samples, num_tokens = batch.x.shape[-3:-1]
        total[0].add_(torch.tensor([num_samples, num_samples * num_tokens]))


class SymmetricMoment(Moment):
    """A sum of symmetric matrices, of which only the lower half is computed."""

    def finalize(self, total: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(mirror(matrix) for matrix in total)


class InputMoment(SymmetricMoment):
    def shapes(self, d_in, d_out):
        return ((d_in, d_in),)


class InputVector(Moment):
    def shapes(self, d_in, d_out):
        return ((d_in,),)


class GradMoment(SymmetricMoment):
    def shapes(self, d_in, d_out):
        return ((d_out, d_out),)


def at_least_tiny(size: Tensor) -> Tensor:
    """Clamp a trace or norm to divide by, so that zeros stay zero."""
    return size.clamp(min=torch.finfo(size.dtype).tiny)


def median(values: Tensor) -> Tensor:
    """The median of samples `[N, 1]`: for an even number, the mean of the middle two."""
    ordered, num_samples = values.sort(dim=-2).values, values.shape[-2]
    return torch.lerp(ordered[..., (num_samples - 1) // 2, None, :], ordered[..., num_samples // 2, None, :], 0.5)


def of_unit_trace(weights: Tensor, energies: Tensor) -> Tensor:
    """Scale weights so that Σ weight · energy, the trace of the weighted sum, is 1; both have the same shape."""
    return weights / at_least_tiny((weights * energies).sum(dim=(-2, -1), keepdim=True))


class InputGram(InputMoment):
    """Σ x_t x_tᵀ `[n, n]`."""

    needs_grads = False
    takes_heads = True

    def add(self, total, batch):
        add_symmetric(total[0], batch.x, batch.x)


class InputSum(InputVector):
    """Σ x_t `[n]`."""

    needs_grads = False
    takes_heads = True

    def add(self, total, batch):
        total[0].add_(batch.x.sum(dim=(-3, -2)))


class MeanInputGram(InputMoment):
    """Σ_k x̄_k x̄_kᵀ `[n, n]`, x̄_k the mean over the tokens of sample k."""

    needs_grads = False
    takes_heads = True

    def add(self, total, batch):
        mean = batch.x.mean(dim=-2).unsqueeze(-3)
        add_symmetric(total[0], mean, mean)


@dataclass(frozen=True)
class ClippedGradMoment(SymmetricMoment):
    """A moment in which the output gradient of each sample has at most a certain Frobenius norm.

    `grad_clip` is that norm, `median` of its batch, or None for none; `tokens` clips each by its sample's mean norm.
    """

    grad_clip: GradClip = None
    takes_heads = True  # subclasses that cannot add all heads at once say False

    def add(self, total, batch):
        self.add_clipped(total, batch.with_clipped_tokens if self.grad_clip == "tokens" else batch)

    @abstractmethod
    def add_clipped(self, total: Any, batch: LayerBatch) -> None:
        """Add one batch, in place; its tokens are already clipped, its samples are to be weighted by `weights`."""

    def weights(self, batch: LayerBatch) -> Tensor:
        """Weights `[N, 1]` of samples in sums that are quadratic in their gradients: 1 for unclipped samples."""
        clip = self.grad_clip
        if clip not in batch.weights:
            norms = batch.g_energy.sum(dim=-1, keepdim=True).sqrt()
            if clip is None or clip == "tokens":
                batch.weights[clip] = torch.ones_like(norms)
            else:
                bound = median(norms) if clip == "median" else torch.full_like(norms, clip)
                batch.weights[clip] = (bound / at_least_tiny(norms)).clamp(max=1).square()  # 0 where both are 0
        return batch.weights[clip]


class ScaledGradMoment(ClippedGradMoment):
    """A moment whose last matrix keeps the trace for unclipped samples, an extra scalar: clipping keeps the scale."""

    def init_state(self, layer, like, d_in, d_out):
        return *super().init_state(layer, like, d_in, d_out), like.new_zeros(())

    def finalize(self, total):
        *matrices, trace = total
        *others, last = super().finalize(tuple(matrices))
        factor = trace / at_least_tiny(last.trace())
        return *others, last.mul_(factor.clamp(max=torch.finfo(factor.dtype).max))  # a matrix of zeros stays zero


class GradGram(ScaledGradMoment, GradMoment):
    """Σ g_t g_tᵀ `[m, m]`."""

    def add_clipped(self, total, batch):
        gram, trace = total
        add_symmetric(gram, batch.g, batch.g, self.weights(batch))
        trace.add_(batch.g_energy.sum(dim=(-2, -1)))


class SummedGradGram(ScaledGradMoment, GradMoment):
    """Σ_k (Σ_t g_t)(Σ_t g_t)ᵀ `[m, m]`."""

    def add_clipped(self, total, batch):
        gram, trace = total
        summed = batch.g.sum(dim=-2).unsqueeze(-3)
        add_symmetric(gram, summed, summed, self.weights(batch).mT)
        trace.add_(summed.square().sum(dim=(-3, -2, -1)))


@dataclass(frozen=True)
class GradWeightedInputGram(ClippedGradMoment, InputMoment):
    """Σ ‖g_t‖² x_t x_tᵀ `[n, n]`; with `normalize: batch` each batch's sum is first divided by its trace."""

    normalize: Normalize = "none"

    def add_clipped(self, total, batch):
        weights = self.weights(batch) * batch.g_energy
        if self.normalize == "batch":
            weights = of_unit_trace(weights, batch.x_energy)
        add_symmetric(total[0], batch.x, batch.x, weights)


class InputWeightedGradGram(ScaledGradMoment, GradMoment):
    """Σ ‖x_t‖² g_t g_tᵀ `[m, m]`."""

    def add_clipped(self, total, batch):
        gram, trace = total
        add_symmetric(gram, batch.g, batch.g, self.weights(batch) * batch.x_energy)
        trace.add_((batch.x_energy * batch.g_energy).sum(dim=(-2, -1)))


@dataclass(frozen=True)
class SampleGradGrams(ScaledGradMoment):
    """Σ_k D_kᵀ D_k `[n, n]` and Σ_k D_k D_kᵀ `[m, m]`; with `normalize: batch` each batch of the first has trace 1."""

    normalize: Normalize = "none"

    def shapes(self, d_in, d_out):
        return (d_in, d_in), (d_out, d_out)

    def add_clipped(self, total, batch):
        inputs, outputs, trace = total
        energies = batch.sample_grad_energy.sum(dim=-1, keepdim=True)
        trace.add_(energies.sum(dim=(-2, -1)))
        weights = of_inputs = self.weights(batch)
        if self.normalize == "batch":
            of_inputs = of_unit_trace(weights, energies)
        if batch.tokens_are_cheaper:
            add_symmetric(inputs, batch.x, batch.mixed_inputs, of_inputs)
            add_symmetric(outputs, batch.g, batch.mixed_grads, weights)
        else:
            grads = batch.sample_grads
            add_symmetric(inputs, grads, grads, of_inputs)
            add_symmetric(outputs, grads.mT, grads.mT, weights)


class SampleGradEnergy(InputVector):
    """Σ_k Σ_i D_k[i, j]² `[n]`: the diagonal of the empirical Fisher, summed over outputs."""

    takes_heads = True

    def add(self, total, batch):
        total[0].add_(batch.sample_grad_energy.sum(dim=-2))


class InputFourthMoment(Moment):
    """Σ ‖x_t‖⁴, a scalar."""

    needs_grads = False
    takes_heads = True

    def shapes(self, d_in, d_out):
        return ((),)

    def add(self, total, batch):
        total[0].add_(batch.x_energy.square().sum(dim=(-2, -1)))


@dataclass(frozen=True)
class InputMagnitude(InputVector):
    """Σ over batches of mean or max |x| per feature `[n]`; it depends on the batch size."""

    statistic: Literal["mean", "max"]
    needs_grads = False

    def add(self, total, batch):
        magnitude = batch.x.abs().flatten(0, 1)
        total[0].add_(magnitude.mean(dim=0) if self.statistic == "mean" else magnitude.amax(dim=0))


class LiteralShrunkGram(InputMoment):
    """Σ over batches of the batch's mean XᵀX, shrunk by λ = clip(1e10 (tr S - tr T) / ‖S - T‖², 0, 1).

    T = mean(diag S) I has the same trace, so λ is only rounding error: FLAR's published code leaves T in float32.
    """

    needs_grads = False

    def add(self, total, batch):
        x = batch.x.flatten(0, 1).double()
        gram = x.T @ x / batch.num_samples
        target = gram.diagonal().mean().float() * torch.eye(len(gram), device=gram.device)
        distance = (gram - target).square().sum()
        amount = (1e10 * (gram.trace() - target.trace()) / distance).nan_to_num().clip(0, 1)
        total[0].add_(torch.lerp(gram, target.double(), amount))


@dataclass(frozen=True, kw_only=True)
class TokenPowerStep(ClippedGradMoment):
    """Σ (g_tᵀ B g_t) x_t x_tᵀ `[n, n]` and Σ (x_tᵀ A x_t) g_t g_tᵀ `[m, m]` for A and B of the previous step, and tr A.

    One more token-wise power iteration (paper, theorem 4.2). `previous`, A and B by layer, follows from other fields.
    """

    iteration: int
    previous: Mapping[str, tuple[Tensor, Tensor]] = field(compare=False, repr=False)
    normalize: Normalize = "none"
    takes_heads = False

    def shapes(self, d_in, d_out):
        return (d_in, d_in), (d_out, d_out), ()

    def init_state(self, layer, like, d_in, d_out):
        A, B = (factor.to(like) for factor in self.previous[layer])
        return like.new_zeros(d_in, d_in), like.new_zeros(d_out, d_out), A, B

    def add_clipped(self, total, batch):
        inputs, grads, A, B = total
        weights = self.weights(batch)
        of_inputs = weights * ((batch.x @ A) * batch.x).sum(dim=-1)
        of_grads = weights * ((batch.g @ B) * batch.g).sum(dim=-1)
        if self.normalize == "batch":
            of_grads = of_unit_trace(of_grads, batch.x_energy)
        add_symmetric(inputs, batch.x, batch.x, of_grads)
        add_symmetric(grads, batch.g, batch.g, of_inputs)

    def num_held(self, d_in, d_out):
        return 2 * (d_in**2 + d_out**2)

    def reducible(self, total, num_samples):
        return total[:2]

    def finalize(self, total):
        inputs, grads, A, _ = total
        return mirror(inputs), mirror(grads), A.trace()


class GroupSums:
    """Sums of the weight gradients of groups of samples, `[m, n]`, in order: only the last one's is on the device."""

    def __init__(self, like: Tensor, d_out: int, d_in: int):
        self.like, self.shape = like, (d_out, d_in)
        self.sums: dict[int, Tensor] = {}
        self.sizes = Counter[int]()  # samples by group

    def add(self, group: int, grads: Tensor, inputs: Tensor) -> None:
        """Add the weight gradients of some samples of one group, `[k, T, m]` and `[k, T, n]`."""
        if group not in self.sums:
            self.to_host()
            self.sums[group] = self.like.new_zeros(self.shape)
        self.sums[group].addmm_(grads.flatten(0, 1).T, inputs.flatten(0, 1))
        self.sizes[group] += len(grads)

    def to_host(self) -> None:
        self.sums = {group: total.cpu() for group, total in sorted(self.sums.items())}


@dataclass(frozen=True)
class GroupGradients(Moment):
    """The mean weight gradient of each of the K groups of `group_size` consecutive samples `[K, m, n]`.

    It grows with the samples, so it is in main memory, which `layers_at_once` bounds, and is not cached.
    """

    group_size: int = 64

    is_kept = False  # it takes hundreds of times the network's size
    can_offload = False

    def shapes(self, d_in, d_out):
        return ((d_out, d_in),)

    def init_state(self, layer, like, d_in, d_out):
        return GroupSums(like, d_out, d_in)

    def add(self, total, batch):
        start = 0
        while start < batch.num_samples:
            group, within = divmod(batch.first_sample + start, self.group_size)
            end = min(batch.num_samples, start + self.group_size - within)
            total.add(group, batch.g[start:end], batch.x[start:end])
            start = end

    def reducible(self, total, num_samples):
        for group in range(math.ceil(num_samples / self.group_size)):
            total.sizes[group] = min(self.group_size, num_samples - group * self.group_size)
            total.sums.setdefault(group, total.like.new_zeros(total.shape, device="cpu"))
        total.to_host()
        return tuple(total.sums.values())

    def finalize(self, total):
        total.to_host()
        return (torch.stack([sums / total.sizes[group] for group, sums in total.sums.items()]),)
