"""Image classification: how networks see images, top-1 accuracy, and the features of encoders."""

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import timm.data
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from facts.modules.networks import is_encoder, is_transformers, whole_image
from facts.tasks.base import ClassLogits, Evaluation, pass_over
from facts.utils.numerics import shuffled
from facts.utils.options import Count, needing, options

if TYPE_CHECKING:
    from transformers import BaseImageProcessor

NUM_NEIGHBORS, TEMPERATURE = 20, 0.07  # Caron et al., arXiv 2104.14294, appendix F.1, after Wu et al., arXiv 1805.01978
MOST_STEPS = 200  # of the probe's solver

Batch = tuple[Tensor, Tensor]


@options
class Classification(ClassLogits):
    """Top-1 accuracy in percent, calibrated by cross-entropy on the given labels.

    The factors come from `num_calibration` images; searches compare outputs on `num_sensitivity` others. Analyses use
    `num_factors_per_class` evaluation images of each class for the factors, and `num_held_out_per_class` others for the
    comparison (paper, supplement on the comparison).
    """

    num_calibration: Count
    num_sensitivity: Count
    num_factors_per_class: Count = 16
    num_held_out_per_class: Count = 2
    batch_size: Count = 64

    def input_shape(self, model: nn.Module) -> tuple[int, ...]:
        return (1, *data_config(model)["input_size"])

    @abstractmethod
    def evaluation(self, model: nn.Module) -> Iterable[Batch]:
        """Batches of images that no other part of the task sees."""

    def evaluate(
        self, model: nn.Module, precision: torch.dtype = torch.float32, original: nn.Module | None = None
    ) -> Evaluation:
        right = are_right(model, self.evaluation(model), precision)
        return Evaluation({"top1": percentage(right)}, {"top1": right})


def are_right(model: nn.Module, batches: Iterable[Batch], precision: torch.dtype = torch.float32) -> Tensor:
    """Check whether each sample's largest logit is at its label: `[N]`, in the order of the data."""
    return torch.cat(pass_over(batches, model, lambda logits, at: (logits.argmax(dim=-1) == at).cpu(), precision))


def percentage(outcomes: Tensor) -> float:
    """Percentage of true values among `outcomes` `[N]`."""
    return 100 * int(outcomes.sum()) / len(outcomes)


def balanced(labels: Tensor, counts: Sequence[int], seed: int = 0) -> list[Tensor]:
    """Disjoint, shuffled index sets, one per count, each with that many samples of every class.

    Raises `ValueError` if a class has too few.
    """
    order = shuffled(len(labels), seed)
    one_hot = F.one_hot(labels[order])
    fewest = one_hot.sum(dim=0).min().item()
    if fewest < sum(counts):
        message = f"needs {sum(counts)} evaluation images of every class; one has {fewest}"
        raise ValueError(f"num_factors_per_class + num_held_out_per_class {message}")
    place = (one_hot.cumsum(dim=0) * one_hot).sum(dim=1) - 1  # number of earlier samples of its class
    ends = list(itertools.accumulate(counts, initial=0))
    return [order[(start <= place) & (place < end)] for start, end in itertools.pairwise(ends)]


def halves(labels: np.ndarray) -> tuple[list[int], list[int]]:
    """Sorted indices of a random half of each class, rounded up, and of all others.

    If no class has two samples, they are halves of all.
    """
    if len(np.unique(labels)) == len(labels):
        labels = np.zeros_like(labels)
    order = shuffled(len(labels), 0).numpy()
    order = order[np.argsort(labels[order], kind="stable")]
    _, starts, counts = np.unique(labels[order], return_index=True, return_counts=True)
    places = np.arange(len(labels)) - np.repeat(starts, counts)  # within each class
    is_first = 2 * places < np.repeat(counts, counts)
    return sorted(order[is_first].tolist()), sorted(order[~is_first].tolist())


def evaluate_features(
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
        with needing("experiments", "evaluating features by classes"):  # before the other passes
            from sklearn.linear_model import LogisticRegression
            from sklearn.neighbors import KNeighborsClassifier
            from sklearn.pipeline import make_pipeline
            from sklearn.preprocessing import StandardScaler
    features, _ = features_of(model, evaluation, precision)
    error = (features - expected).square().sum(1) / expected.square().sum(1)
    outcomes = {"relative_error": error, "cosine": F.cosine_similarity(features, expected)}
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


def features_of(
    model: nn.Module, batches: Iterable[Any], precision: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor | None]:
    """Features `[N, D]` in float64, and the labels `[N]` of the images, or None."""

    def on_cpu(outputs: Any, targets: Tensor | None) -> tuple[Tensor, Tensor | None]:
        found = whole_image(outputs)
        if not isinstance(found, Tensor) or found.flatten(1).shape[1] != found.shape[1]:  # [N, D], or [N, D, 1, 1]
            what = tuple(found.shape) if isinstance(found, Tensor) else type(outputs).__name__
            raise ValueError(f"encoders are compared by features [N, D], not by {what}: the network may need pooling")
        return found.flatten(1).double().cpu(), None if targets is None else targets.cpu()

    features, labels = zip(*pass_over(batches, model, on_cpu, precision), strict=True)
    return torch.cat(features), None if labels[0] is None else torch.cat(labels)


@dataclass(frozen=True)
class Processed:
    """Transform of a PIL image into the tensor that a transformers model expects, by its image processor."""

    processor: "BaseImageProcessor"

    def __call__(self, image: Image.Image) -> Tensor:
        return self.processor(image, return_tensors="pt")["pixel_values"][0]


def processed_for(model: nn.Module) -> Processed | None:
    """Transform of a transformers model; None for other networks. Raises `ValueError` if it has no image processor."""
    if not is_transformers(model):
        return None
    if not hasattr(model, "image_processor"):
        message = f"{type(model).__name__} has no image processor: set model.image_processor"
        raise ValueError(f"{message}, or keep preprocessor_config.json next to its weights")
    return Processed(model.image_processor)


def data_config(model: nn.Module) -> dict[str, Any]:
    """The `input_size`, `mean` and `std` of a network's images; for timm's, also the rest of its data configuration."""
    processed = processed_for(model)
    if processed is None:
        config = timm.data.resolve_model_data_config(model)
        for name in ("mean", "std"):
            if len(config[name]) != (channels := config["input_size"][0]):
                config[name] = (sum(config[name]) / len(config[name]),) * channels  # as timm's loaders do
        return config
    processor: Any = processed.processor
    mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else ([0.0] * 3, [1.0] * 3)
    shape = processed(Image.new("RGB", (64, 64))).shape
    return {"input_size": tuple(shape), "mean": tuple(mean), "std": tuple(std)}


def preprocessing_key(model: nn.Module) -> Any:
    """Everything that determines the tensors of a network's evaluation images."""
    processed = processed_for(model)
    return data_config(model) if processed is None else repr(processed)


def num_classes(model: nn.Module) -> int | None:
    """Number of classes, 0 for an encoder; None if a network of your own does not record it."""
    if is_encoder(model):
        return 0
    return model.config.num_labels if is_transformers(model) else getattr(model, "num_classes", None)
