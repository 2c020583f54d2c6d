"""What a network is for: its calibration data, its loss, and how well it does."""

from facts.tasks.base import Task
from facts.tasks.classification import Digits, ImageNet

__all__ = ["Digits", "ImageNet", "Task"]
