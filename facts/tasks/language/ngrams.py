"""Perplexities of n-gram models, as baselines for language models."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def unigram_perplexity(training: Tensor, evaluation: Iterable[Tensor], num_tokens: int) -> float:
    """Perplexity of windows `[N, T]` under token counts in a text `[L]`, plus one for each of `num_tokens`."""
    log_probabilities = _frequencies(training, num_tokens).log()
    return _perplexity(log_probabilities[window[:, 1:]] for window in evaluation)


def bigram_perplexity(training: Tensor, evaluation: Iterable[Tensor], num_tokens: int) -> float:
    """Perplexity of windows `[N, T]` under counts of pairs in a text `[L]`, mixed with the counts of single tokens.

    The weight of single tokens is s / (s + c), with c the count of a token and s the number of its different successors
    (Witten and Bell).
    """
    single = _frequencies(training, num_tokens)
    pairs, counts = (num_tokens * training[:-1] + training[1:]).unique(return_counts=True)
    seen = torch.bincount(training[:-1], minlength=num_tokens).double()
    successors = torch.bincount(pairs // num_tokens, minlength=num_tokens).double()

    def log_probabilities(window: Tensor) -> Tensor:
        before, after = window[:, :-1], window[:, 1:]
        pair = num_tokens * before + after
        place = torch.searchsorted(pairs, pair).clamp(max=len(pairs) - 1)
        count = torch.where(pairs[place] == pair, counts[place], 0)
        mixed = (count + successors[before] * single[after]) / (seen[before] + successors[before])
        return torch.where(seen[before] > 0, mixed, single[after]).log()

    return _perplexity(map(log_probabilities, evaluation))


def _frequencies(tokens: Tensor, num_tokens: int) -> Tensor:
    counts = torch.bincount(tokens, minlength=num_tokens).double() + 1
    return counts / counts.sum()


def _perplexity(log_probabilities: Iterable[Tensor]) -> float:
    return math.exp(-torch.cat([values.flatten() for values in log_probabilities]).mean())
