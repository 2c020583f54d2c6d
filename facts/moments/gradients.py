"""Moments of whole weight gradients: the mean of each group of samples, and products of the Fisher with random probes.

Legend: N samples, T tokens, n = d_in, m = d_out, K probes; D_k = G_kᵀ X_k [m, n] is the weight gradient of sample k.
The empirical Fisher itself, `[m n, m n]`, is never formed.
"""

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from facts.moments.statistics import Moment
from facts.utils.cache import content_key


class GroupSums:
    """Sums of the weight gradients of each group of samples, `[m, n]`.

    Groups come in order: only the sum of the last one is on the device.
    """

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

    As its size grows with the number of samples, it accumulates in main memory and is not cached; for large networks,
    `MemoryPolicy(layers_at_once=...)` bounds the memory.
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
