"""The paper's formulas and those of the methods it compares, word for word, in float64, from per-sample gradients.

Every function takes batches of samples and returns `(A, B)`, None for the identity.
"""

import torch
from torch import Tensor

from tests.oracles.samples import Sample

Batches = list[list[Sample]]


def every(batches: Batches) -> list[Sample]:
    return [sample for batch in batches for sample in batch]


def mean(values) -> Tensor:
    values = list(values)
    return sum(values) / len(values)


def facts(batches: Batches, grad_clip=None, normalize="none"):
    """The double loop over samples and tokens."""
    A, B, trace = 0, 0, 0
    for batch in batches:
        batch_A = 0
        for sample in batch:
            G = sample.G
            if grad_clip is not None and G.norm() > grad_clip:
                G = G * (grad_clip / G.norm())
            for x, g in zip(sample.X, G, strict=True):
                batch_A = batch_A + (g @ g) * torch.outer(x, x)
                B = B + (x @ x) * torch.outer(g, g)
                trace = trace + (x @ x) * (g @ g)
        A = A + (batch_A / batch_A.trace() if normalize == "batch" else batch_A)
    return A / len(every(batches)), B / trace


def kfac_expand(batches: Batches):
    A = mean(torch.outer(x, x) for s in every(batches) for x in s.X)
    B = mean(sum(torch.outer(g, g) for g in s.G) for s in every(batches))
    return A, B


def kfac_reduce(batches: Batches):
    A = mean(torch.outer(s.X.mean(dim=0), s.X.mean(dim=0)) for s in every(batches))
    B = mean(torch.outer(s.G.sum(dim=0), s.G.sum(dim=0)) for s in every(batches))
    return A, B


def shampoo2(batches: Batches):
    A = mean(s.D.T @ s.D for s in every(batches))
    B = mean(s.D @ s.D.T for s in every(batches)) / mean(s.D.square().sum() for s in every(batches))
    return A, B


def gfwsvd(batches: Batches, group_size=64):
    """Dense SVD of the Fisher of group means, rearranged (Van Loan and Pitsianis): one row a block of `A ⊗ B`."""
    D = [sample.D for sample in every(batches)]
    groups = [mean(D[start : start + group_size]) for start in range(0, len(D), group_size)]
    m, n = D[0].shape
    fisher = mean(torch.outer(d.T.flatten(), d.T.flatten()) for d in groups)  # columns of d stacked
    blocks = [fisher[i * m : (i + 1) * m, j * m : (j + 1) * m].flatten() for i in range(n) for j in range(n)]
    u, s, vh = torch.linalg.svd(torch.stack(blocks), full_matrices=False)
    A, B = u[:, 0].reshape(n, n) * s[0].sqrt(), vh[0].reshape(m, m) * s[0].sqrt()
    return A * A.trace().sign(), B * B.trace().sign()


def svd_llm(batches: Batches):
    return sum(s.X.T @ s.X for s in every(batches)), None


def flar(batches: Batches):
    return mean(torch.outer(x, x) for s in every(batches) for x in s.X), None


def asvd(batches: Batches, statistic="mean", alpha=0.5):
    scale = 0
    for batch in batches:
        magnitudes = torch.cat([s.X for s in batch]).abs()
        scale = scale + (magnitudes.mean(dim=0) if statistic == "mean" else magnitudes.max(dim=0).values)
    return torch.diag((scale**alpha + 1e-6) ** 2), None


def fwsvd(batches: Batches, exponent=1.0):
    diagonal = mean(s.D**2 for s in every(batches))
    return torch.diag(diagonal.sum(dim=0) ** exponent), None


def pela(batches: Batches):
    return None, None


ORACLES = {
    "facts": facts,
    "kfac_expand": kfac_expand,
    "kfac_reduce": kfac_reduce,
    "shampoo2": shampoo2,
    "gfwsvd": gfwsvd,
    "svd_llm": svd_llm,
    "flar": flar,
    "asvd": asvd,
    "fwsvd": fwsvd,
    "pela": pela,
}
