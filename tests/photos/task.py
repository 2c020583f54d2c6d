"""The photos as a task of experiments."""

from typing import ClassVar

from facts.tasks.classification.base import Classification
from facts.utils.cache import content_key
from facts.utils.options import options
from tests.photos.data import NETWORKS, load_photos

NUM_PHOTOS = 1000  # to calibrate on and for searches, one a class


@options
class Photos(Classification):
    """At most half of the photos give the factors, some others are for searches, and 650 validation photos judge."""

    num_evaluation: ClassVar[int] = 650

    def inspect(self):
        return f"{self.num_evaluation} validation photos"

    def content_key(self, model):
        return content_key(self, preprocessed_for(model))

    def calibration(self, model):
        return self._seen(model, self.num_calibration, start=0)

    def sensitivity(self, model):
        return self._seen(model, self.num_sensitivity, start=1)

    def evaluation(self, model):
        return load_photos("validation", network=preprocessed_for(model))

    def analysis(self, model):
        raise NotImplementedError

    def training(self, model, epoch, seed=0):
        raise NotImplementedError

    def _seen(self, model, number, start):
        """So many photos, evenly over the classes; the steps are even, so that those from 0 and from 1 differ."""
        every = NUM_PHOTOS // number // 2 * 2
        return load_photos("calibration", start=start, every=every, network=preprocessed_for(model))


def preprocessed_for(model):
    """The network whose pixels are scaled as the model's."""
    return next(name for name, (_, mean, _) in NETWORKS.items() if list(model.pretrained_cfg["mean"]) == mean)
