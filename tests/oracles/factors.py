"""The paper's formulas and those of the methods it compares, word for word, in float64, from per-sample gradients.

Every function takes batches of samples and returns `(A, B)`, None for the identity.
"""

import statistics

import torch
from torch import Tensor

from tests.oracles.samples import Sample

Batches = list[list[Sample]]


def every(batches: Batches) -> list[Sample]:
    return [sample for batch in batches for sample in batch]


def mean(values) -> Tensor:
    values = list(values)
    return sum(values) / len(values)


def clipped(batches: Batches, grad_clip) -> Batches:
    """The samples with no gradient longer than the bound, or than the median of its batch."""
    return [[_clipped(sample, batch, grad_clip) for sample in batch] for batch in batches]


def _clipped(sample: Sample, batch: list[Sample], grad_clip) -> Sample:
    norm = float(sample.G.norm())
    bound = statistics.median(float(s.G.norm()) for s in batch) if grad_clip == "median" else grad_clip
    return (
        sample
        if bound is None or norm <= bound
        else Sample(sample.X, *(bound / norm * value for value in (sample.G, sample.D)))
    )


def sum_of(parts, normalize):
    """The sum of each batch's part of A, as it is, or each of trace 1."""
    return sum(part / part.trace() if normalize == "batch" else part for part in parts)


def scaled(matrix, trace):
    """The matrix with this trace: that of unclipped gradients is the scale of clipped ones."""
    return matrix * trace / matrix.trace()


def facts(batches: Batches, grad_clip="median", normalize="batch"):
    """The double loop over samples and tokens."""
    parts, B = [], 0
    for batch in clipped(batches, grad_clip):
        parts.append(0)
        for sample in batch:
            for x, g in zip(sample.X, sample.G, strict=True):
                parts[-1] = parts[-1] + (g @ g) * torch.outer(x, x)
                B = B + (x @ x) * torch.outer(g, g)
    trace = sum((x @ x) * (g @ g) for s in every(batches) for x, g in zip(s.X, s.G, strict=True))
    return scaled(sum_of(parts, normalize), trace) / len(every(batches)), scaled(B, 1)


def kfac_expand(batches: Batches, grad_clip="median"):
    A = mean(torch.outer(x, x) for s in every(batches) for x in s.X)
    B = mean(sum(torch.outer(g, g) for g in s.G) for s in every(clipped(batches, grad_clip)))
    return A, scaled(B, mean(s.G.square().sum() for s in every(batches)))


def kfac_reduce(batches: Batches, grad_clip="median"):
    A = mean(torch.outer(s.X.mean(dim=0), s.X.mean(dim=0)) for s in every(batches))
    B = mean(torch.outer(s.G.sum(dim=0), s.G.sum(dim=0)) for s in every(clipped(batches, grad_clip)))
    return A, scaled(B, mean(s.G.sum(dim=0).square().sum() for s in every(batches)))


def shampoo2(batches: Batches, grad_clip="median", normalize="batch"):
    energy = mean(s.D.square().sum() for s in every(batches))
    batches = clipped(batches, grad_clip)
    A = sum_of([sum(s.D.T @ s.D for s in batch) for batch in batches], normalize)
    return scaled(A, energy), scaled(sum(s.D @ s.D.T for s in every(batches)), 1)


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
    return torch.diag(mean(s.D**2 for s in every(batches)).sum(dim=0) ** exponent), None


def pela(batches: Batches):
    return None, None


ORACLES = {
    "facts": facts,
    "kfac_expand": kfac_expand,
    "kfac_reduce": kfac_reduce,
    "shampoo2": shampoo2,
    "gfwsvd": gfwsvd,
    "svd_llm": svd_llm,
    "svd_llm_v2": svd_llm,
    "flar": flar,
    "asvd": asvd,
    "fwsvd": fwsvd,
    "pela": pela,
}
