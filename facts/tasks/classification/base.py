"""Image classification: shared parts of all data sets."""

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from facts.modules.modes import autocast
from facts.modules.networks import is_transformers, run
from facts.tasks.base import ClassLogits, Judgement
from facts.tasks.classification.preprocessing import data_config
from facts.utils.batches import gathered, shared, to_device
from facts.utils.options import Count, options

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
        size = data_config(model)["input_size"] if is_transformers(model) else model.pretrained_cfg["input_size"]
        return (1, *size)

    @abstractmethod
    def evaluation(self, model: nn.Module) -> Iterable[Batch]:
        """Batches of images that no other part of the task sees."""

    def evaluate(self, model: nn.Module, precision: torch.dtype = torch.float32) -> dict[str, float]:
        return self.judge(model, precision).metrics

    def judge(self, model: nn.Module, precision: torch.dtype = torch.float32) -> Judgement:
        right = are_right(model, self.evaluation(model), precision)
        return Judgement({"top1": percentage(right)}, {"top1": right})


def are_right(model: nn.Module, batches: Iterable[Batch], precision: torch.dtype = torch.float32) -> Tensor:
    """Check whether each sample's largest logit is at its label: `[N]`, in the order of the data."""
    device, own = next(model.parameters()).device, []
    model.eval()
    for batch in shared(batches, "evaluation"):
        images, labels = to_device(batch, device)
        with torch.inference_mode(), autocast(device, precision):
            own.append(run(model, images).argmax(dim=-1) == labels)
    return torch.cat(gathered([batch.cpu() for batch in own]))


def percentage(outcomes: Tensor) -> float:
    """Percentage of true values among `outcomes` `[N]`."""
    return 100 * int(outcomes.sum()) / len(outcomes)


def balanced(labels: Tensor, counts: Sequence[int], seed: int = 0) -> list[Tensor]:
    """Disjoint, shuffled index sets, one per count, each with that many samples of every class.

    Raises `ValueError` if a class has too few.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    one_hot = F.one_hot(labels[order])
    fewest = one_hot.sum(dim=0).min().item()
    if fewest < sum(counts):
        message = f"needs {sum(counts)} evaluation images of every class; one has {fewest}"
        raise ValueError(f"num_factors_per_class + num_held_out_per_class {message}")
    place = (one_hot.cumsum(dim=0) * one_hot).sum(dim=1) - 1  # number of earlier samples of its class
    ends = list(itertools.accumulate(counts, initial=0))
    return [order[(start <= place) & (place < end)] for start, end in itertools.pairwise(ends)]
