"""Moments of whole weight gradients: the mean of each group of samples, and products of the Fisher with random probes.

Legend: N samples, T tokens, n = d_in, m = d_out, K probes; D_k = G_kᵀ X_k [m, n] is the weight gradient of sample k.
The empirical Fisher itself, `[m n, m n]`, is never formed.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from facts.moments.statistics import Moment
from facts.utils.cache import content_key


class GroupSums:
    """Sums of the weight gradients of each group of samples, `[m, n]`; finished groups are in main memory."""

    def __init__(self, current: Tensor):
        self.group, self.current = 0, current
        self.sizes: dict[int, int] = {}  # samples by group
        self.finished: dict[int, Tensor] = {}

    def add(self, group: int, grads: Tensor, inputs: Tensor) -> None:
        """Add the weight gradients of some samples of one group, `[k, T, m]` and `[k, T, n]`."""
        if group != self.group:
            self.finish_group()
            self.group = group
        self.current.addmm_(grads.flatten(0, 1).T, inputs.flatten(0, 1))
        self.sizes[group] = self.sizes.get(group, 0) + len(grads)

    def finish_group(self) -> None:
        if self.group in self.sizes and self.group not in self.finished:
            self.finished[self.group] = self.current.cpu()
            self.current = torch.zeros_like(self.current)


@dataclass(frozen=True)
class GroupGradients(Moment):
    """The mean weight gradient of each of the K groups of `group_size` consecutive samples `[K, m, n]`.

    As its size grows with the number of samples, it accumulates in main memory and is not cached; for large networks,
    `MemoryPolicy(layers_at_once=...)` bounds the memory.
    """

    group_size: int = 64

    is_kept = False  # it takes hundreds of times the network's size
    can_offload = False

    def shapes(self, d_in, d_out):
        return ((d_out, d_in),)

    def init_state(self, layer, like, d_in, d_out):
        return GroupSums(like.new_zeros(d_out, d_in))

    def add(self, total, batch):
        start = 0
        while start < batch.num_samples:
            group, within = divmod(batch.first_sample + start, self.group_size)
            end = min(batch.num_samples, start + self.group_size - within)
            total.add(group, batch.g[start:end], batch.x[start:end])
            start = end

    def reducible(self, total, num_samples):
        total.finish_group()
        for group in range(math.ceil(num_samples / self.group_size)):
            total.sizes[group] = min(self.group_size, num_samples - group * self.group_size)
            total.finished.setdefault(group, torch.zeros_like(total.current, device="cpu"))
        return tuple(total.finished[group] for group in sorted(total.finished))

    def finalize(self, total):
        total.finish_group()
        return (torch.stack([total.finished[group] / total.sizes[group] for group in sorted(total.finished)]),)


def make_probes(num_probes: int, d_out: int, d_in: int, seed: int) -> Tensor:
    """Draw Gaussian probes `[K, m, n]` in float32, the same on every device and for layers of the same shape."""
    own_seed = int(content_key(seed, d_out, d_in), base=16) % 2**63
    return torch.randn(num_probes, d_out, d_in, generator=torch.Generator().manual_seed(own_seed))


@dataclass(frozen=True)
class ProbeMoment(Moment):
    """A sum of matrices `[K, m, n]`, one per probe."""

    num_probes: int
    seed: int = 0

    can_offload = False  # drawing the probes for every batch would take longer than the batch

    def shapes(self, d_in, d_out):
        return ((self.num_probes, d_out, d_in),)

    def init_state(self, layer, like, d_in, d_out):
        probes = make_probes(self.num_probes, d_out, d_in, self.seed).to(like)
        return torch.zeros_like(probes), probes

    def num_held(self, d_in, d_out):
        return 2 * self.num_probes * d_out * d_in

    def reducible(self, total, num_samples):
        return total[:1]

    def finalize(self, total):
        return total[:1]


@dataclass(frozen=True)
class FisherProducts(ProbeMoment):
    """Σ_k D_k ⟨D_k, V⟩: the Fisher times a probe."""

    def add(self, total, batch):
        products, probes = total
        grads = batch.sample_grads.flatten(1)
        products.view(len(probes), -1).addmm_((grads @ probes.flatten(1).T).T, grads)


@dataclass(frozen=True)
class TokenLocalProducts(ProbeMoment):
    """Σ_k Σ_t g_t (g_tᵀ V x_t) x_tᵀ: the token-local part of the Fisher times a probe."""

    def add(self, total, batch):
        x, g = batch.x.flatten(0, 1), batch.g.flatten(0, 1)
        for product, probe in zip(*total, strict=True):
            errors = ((g @ probe) * x).sum(dim=1, keepdim=True)
            product.addmm_((g * errors).T, x)
