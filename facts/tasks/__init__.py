"""Tasks: calibration data, losses and metrics for one kind of network each."""

from facts.tasks.base import Evaluation, Task
from facts.tasks.classification.images import ImageFolder, ImageNet

__all__ = ["Evaluation", "ImageFolder", "ImageNet", "Task"]
