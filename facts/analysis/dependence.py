"""Activation-gradient coupling: how far a token's inputs and output gradients depend on each other."""

import numpy as np

from facts.analysis.token_store import TokenStore
from facts.utils.extras import needing
from facts.utils.progress import with_progress

MIN_SAMPLES = 21  # below, hyppo permutes samples instead of using the chi-square limit


def load_dcorr() -> type:
    """Import hyppo's class. Raises `ModuleNotFoundError` that says what to install."""
    with needing("analysis", "distance correlation"):
        from hyppo.independence import Dcorr
    return Dcorr


def distance_correlations(store: TokenStore) -> tuple[list[float | None], list[float | None]]:
    """Distance correlation of x_t and g_t over samples, and its p-value, for every token.

    hyppo's `Dcorr` with its defaults: the unbiased estimate of the squared correlation (Székely and Rizzo, 2014), which
    is about 0 for independent variables, and the chi-square p-value. None for a token whose inputs or gradients are the
    same in every sample. Raises `ValueError` for fewer than 21 samples, `ModuleNotFoundError` without hyppo.
    """
    dcorr = load_dcorr()
    if store.num_samples < MIN_SAMPLES:
        raise ValueError(f"distance correlation needs at least {MIN_SAMPLES} samples, got {store.num_samples}")
    correlations, p_values = [], []
    for token in with_progress(range(store.num_tokens), "distance correlation"):
        x, g = (store.read(kind, token, token + 1)[0].double().cpu().numpy() for kind in ("inputs", "grads"))
        varies = np.ptp(x, axis=0).any() and np.ptp(g, axis=0).any()
        correlation, p_value = map(float, dcorr().test(x, g)) if varies else (None, None)
        correlations.append(correlation)
        p_values.append(p_value)
    return correlations, p_values
