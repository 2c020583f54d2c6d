"""Products of the empirical Fisher with random probes; the Fisher itself, `[m n, m n]`, is never formed.

Legend: N samples, T tokens, n = d_in, m = d_out, K probes; D_k = G_kᵀ X_k [m, n] is the weight gradient of sample k.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from facts.moments.statistics import Moment
from facts.utils.cache import content_key


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

    def init_state(self, layer, like, d_in, d_out, file):
        probes = make_probes(self.num_probes, d_out, d_in, self.seed).to(like)
        return torch.zeros_like(probes), probes

    def num_held(self, d_in, d_out):
        return 2 * self.num_probes * d_out * d_in

    def reducible(self, total):
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
