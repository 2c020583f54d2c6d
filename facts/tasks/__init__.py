"""What a network is for: its calibration data, its loss, and how well it does."""

from facts.tasks.base import Task
from facts.tasks.digits import Digits
from facts.tasks.image_folder import ImageFolder
from facts.tasks.imagenet import ImageNet

__all__ = ["Digits", "ImageFolder", "ImageNet", "Task"]
