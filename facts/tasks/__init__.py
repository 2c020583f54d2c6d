"""Tasks: calibration data, losses and metrics for one kind of network each."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={"base": ["Evaluation", "Task"], "classification.images": ["ImageFolder", "ImageNet"]},
)
