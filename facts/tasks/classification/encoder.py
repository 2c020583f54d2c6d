"""Encoders, networks without a classifier: their features next to the original's, and how well they tell classes."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from facts.modules.modes import autocast, evaluating
from facts.modules.networks import run, whole_image
from facts.utils.batches import to_device
from facts.utils.extras import needing

NUM_NEIGHBORS, TEMPERATURE = 20, 0.07  # Caron et al., arXiv 2104.14294, appendix F.1, after Wu et al., arXiv 1805.01978
MOST_STEPS = 200  # of the probe's solver


def judge_features(
    model: nn.Module,
    original: nn.Module,
    reference: Iterable[Any],
    evaluation: Iterable[Any],
    precision: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Outcomes `[N]` of an encoder on the images of `evaluation`, batches with or without labels.

    `relative_error` and `cosine` compare its features with the original's. If both data sets have labels of classes,
    `nearest_top1` and `probe_top1` are 100 for each image that is classified correctly, otherwise 0: by its nearest
    images in `reference` (by cosine, weighted by similarity), or by a linear classifier fitted to `reference`. Raises
    `ValueError` for outputs that are not features `[N, D]`, and `ModuleNotFoundError` without scikit-learn.
    """
    expected, labels = features_of(original, evaluation, precision)
    if labels is not None:
        with needing("experiments", "judging features by classes"):  # before the other passes
            from sklearn.linear_model import LogisticRegression
            from sklearn.neighbors import KNeighborsClassifier
            from sklearn.pipeline import make_pipeline
            from sklearn.preprocessing import StandardScaler
    features, _ = features_of(model, evaluation, precision)
    error = (features - expected).square().sum(1) / expected.square().sum(1)
    outcomes = {"relative_error": error, "cosine": cosine_similarity(features, expected)}
    if labels is None:
        return outcomes
    known, classes = features_of(model, reference, precision)
    if classes is None or len(classes.unique()) == 1:
        return outcomes
    count = min(NUM_NEIGHBORS, len(known))
    nearest = KNeighborsClassifier(count, metric="cosine", weights=lambda far: np.exp(-far / TEMPERATURE))
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=MOST_STEPS))
    for name, method in {"nearest_top1": nearest, "probe_top1": probe}.items():
        found = method.fit(known, classes).predict(features)
        outcomes[name] = 100.0 * torch.from_numpy(found == labels.numpy()).double()
    return outcomes


@torch.inference_mode()
def features_of(model: nn.Module, batches: Iterable[Any], precision: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Features `[N, D]` in float64, and the labels `[N]` of the images, or None."""
    device, features, labels = next(model.parameters()).device, [], []
    with evaluating(model), autocast(device, precision):
        for batch in batches:
            images, *given = batch if isinstance(batch, tuple | list) else (batch,)
            features.append(_vectors(run(model, to_device(images, device))).double().cpu())
            labels += given
    return torch.cat(features), torch.cat(labels) if labels else None


def _vectors(outputs: Any) -> Tensor:
    """Features `[N, D]` of a network's outputs."""
    found = whole_image(outputs)
    if isinstance(found, Tensor) and found.flatten(1).shape[1] == found.shape[1]:  # [N, D], or [N, D, 1, 1]
        return found.flatten(1)
    what = tuple(found.shape) if isinstance(found, Tensor) else type(outputs).__name__
    raise ValueError(f"an encoder is judged by features [N, D], and this one's output is {what}: it may need pooling")
