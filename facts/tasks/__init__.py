"""Tasks: calibration data, losses and metrics for one kind of network each."""

from facts.tasks.base import Task
from facts.tasks.classification.image_folder import ImageDataset, ImageFolder
from facts.tasks.classification.imagenet import ImageNet

__all__ = ["ImageDataset", "ImageFolder", "ImageNet", "Task"]
