"""Cross-token coupling: which token positions share directions of the Fisher (paper, supplement on the comparison)."""

import torch
from torch import Tensor

from facts.analysis.token_store import TokenStore
from facts.utils.progress import with_progress

GRAM_BYTES = 2**27


def cross_token_coupling(store: TokenStore, max_bytes: int = GRAM_BYTES) -> Tensor:
    """The map `[T, T]` of ‖K_x^(t,s) ⊙ K_g^(t,s)‖_F over the mean of its diagonal, in float64 on the CPU.

    K_x^(t,s) `[N, N]` holds the inner products of token t's inputs in one sample with token s's in another, K_g those
    of the output gradients. Several rows t are computed at once, with at most `max_bytes` for their vectors and for
    their K_x; peak memory is about four times that. If all gradients are zero, so is the map.
    """
    num_tokens, num_samples = store.num_tokens, store.num_samples
    widest = max(num_samples, *store.features.values())
    rows = max(1, max_bytes // (num_samples * widest * store.like.element_size()))
    norms = torch.zeros(num_tokens, num_tokens, dtype=torch.float64)
    for start in with_progress(range(0, num_tokens, rows), "cross-token coupling"):
        end = min(start + rows, num_tokens)
        inputs, grads = (store.read(kind, start, end).flatten(0, 1) for kind in ("inputs", "grads"))
        for other in range(start, num_tokens):
            last = min(end, other + 1)  # the map is symmetric
            used = slice((last - start) * num_samples)
            products = inputs[used] @ store.read("inputs", other, other + 1)[0].T
            products *= grads[used] @ store.read("grads", other, other + 1)[0].T
            norms[start:last, other] = torch.linalg.vector_norm(products.view(last - start, -1), dim=1).cpu()
    norms += norms.triu(1).T
    diagonal = norms.diagonal().mean()
    return norms / diagonal if diagonal > 0 else norms
