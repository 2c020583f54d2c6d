"""The task of the profile `photos`: a few labelled photos to calibrate on, others to choose by and to judge by."""

from dataclasses import replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn

from facts.modules.networks import is_encoder
from facts.moments.losses import kl_divergence
from facts.tasks.base import Evaluation
from facts.tasks.classification.base import evaluate_features, features_of, percentage
from facts.tasks.classification.files import TABLE, Files, ImageFiles
from facts.tasks.classification.images import ImageFolder, Transform
from facts.utils.batches import NumberedBatches
from facts.utils.numerics import shuffled
from facts.utils.options import options

PARTS = ("calibration", "validation")


@lru_cache(maxsize=1)
def logits_of(task: "Photos", original: nn.Module, precision: torch.dtype) -> Tensor:
    """Compute the original's outputs once for all cells of a column."""
    return features_of(original, task.evaluation(original), precision)[0]


@options
class Photos(ImageFolder):
    """Photos in the folders `calibration` and `validation` of `root`, with labels in `labels.csv` (`file,label`).

    The factors come from `num_calibration` photos, drawn with `seed`; searches see `num_sensitivity` of the others or,
    if there are none, of the same. Validation photos are cropped, not resized: choices are made by every second one,
    from the first on (`chosen`, `chosen_distance`), and the others judge (`top1`, `distance`, the mean KL divergence of
    the outputs from the original's). Encoders are judged by their features, on all of them.
    """

    transform: Transform = "paper"

    def chosen_indices(self) -> dict[str, list[int]]:
        """Indices of the calibration photos for each use. Raises `ValueError` if there are too few."""
        order = shuffled(len(self.training_images), self.seed).tolist()
        calibration = self._some(order, self.num_calibration)
        others = order[self.num_calibration :] or order
        return {"sensitivity": self._some(others, self.num_sensitivity), "calibration": calibration}

    def inspect(self) -> str:
        self.chosen_indices()
        return super().inspect()

    def analysis(self, model: nn.Module) -> tuple[NumberedBatches, NumberedBatches]:
        """The calibration photos, and the validation photos that judge."""
        return self.calibration(model), self._cropped(model, range(1, len(self.validation_images), 2))

    def evaluation(self, model: nn.Module) -> NumberedBatches:
        return self._cropped(model, range(len(self.validation_images)))

    def evaluate(
        self, model: nn.Module, precision: torch.dtype = torch.float32, original: nn.Module | None = None
    ) -> Evaluation:
        original, photos = original or model, self.evaluation(model)
        if is_encoder(model):
            found = evaluate_features(model, original, self.calibration(model), photos, precision)
            shares = {name: values == 100 for name, values in found.items() if name.endswith("top1")}
            return Evaluation({name: values.mean().item() for name, values in found.items()}, shares)
        logits, labels = features_of(model, photos, precision)
        assert labels is not None
        expected = logits if original is model else logits_of(self, original, precision)
        metrics: dict[str, float] = {}
        outcomes: dict[str, Tensor] = {}
        for start, (accuracy, far) in enumerate((("chosen", "chosen_distance"), ("top1", "distance"))):
            half = slice(start, None, 2)
            outcomes[accuracy] = right = logits[half].argmax(dim=1) == labels[half]
            divergence = kl_divergence(expected[half], logits[half]).item() / len(right)
            metrics |= {accuracy: percentage(right), far: divergence}
        return Evaluation(metrics, outcomes)

    @cached_property
    def _splits(self) -> list[ImageFiles]:
        advice = f"set photos= to a folder with {'/, '.join(PARTS)}/ and {TABLE} (file,label)"
        if not (self.root / TABLE).is_file():
            raise FileNotFoundError(f"no photos at {self.root}: {advice}")
        parts = self._found.parts
        if lacking := [part for part in PARTS if part not in parts]:
            raise ValueError(f"{self.root / TABLE} names no photo in {lacking[0]}/: {advice}")
        return [replace(files, may_change=False) for part in PARTS if isinstance(files := parts[part], Files)]

    def _some(self, order: list[int], number: int) -> list[int]:
        if number > len(order):
            raise ValueError(f"{self.root} has {len(order)} photos for this use, and {number} are asked for")
        return order[:number]

    def _cropped(self, model: nn.Module, indices: range) -> NumberedBatches:
        return replace(self, transform="crop")._batches(model, self.validation_images, indices)
