"""What a network is for: its calibration data, its loss, and how well it does."""

from facts.tasks.base import Task
from facts.tasks.classification.digits import Digits
from facts.tasks.classification.image_folder import ImageFolder
from facts.tasks.classification.imagenet import ImageNet

__all__ = ["Digits", "ImageFolder", "ImageNet", "Task"]
